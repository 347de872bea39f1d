/* As much of libze_loader.so.1 as zeromon reads, with the structures of zes_api.h: one device. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef int result;
typedef void *handle;
enum { OK = 0, UNSUPPORTED = 0x78000003 };

typedef struct {
    u32 stype; void *next;
    struct {
        u32 stype; void *next;
        u32 type, vendor, device, flags, subdevice, clock; u64 most;
        u32 contexts, priority, threads, simd, eus, subslices, slices; u64 timer;
        u32 valid, kernel_valid; uint8_t uuid[16]; char name[256];
    } core;
    u32 subdevices; char serial[64], board[64], brand[64], model[64], vendor[64], driver[64];
} properties;
typedef struct { u32 stype; void *next; u32 type, on_subdevice, subdevice; } part;
typedef struct { u32 stype; void *next; u32 health; u64 free, size; } memory;
typedef struct { u64 value, timestamp; } counter;
typedef struct { u32 stype; void *next; double mhz[5]; u32 reasons; } frequency;
typedef struct { int32_t gen, width; int64_t bytes; } speed;
typedef struct { u64 timestamp, replays, packets, rx, tx; speed now; } pci_stats;
typedef struct { u32 stype; void *next; u32 address[4]; speed most; u32 has[3]; } pci_properties;
typedef struct { u32 stype; void *next; u64 category[7]; } errors;
typedef struct { u32 stype; void *next; u32 pid; u64 memory, shared; u32 engines; } process;

static long parts[2] = {0, 1};
static u64 reads;

static result list(u32 *count, handle *found, u32 n) {
    if (found) for (u32 i = 0; i < n && i < *count; i++) found[i] = &parts[i];
    *count = n;
    return OK;
}
static long of(handle h) { return *(long *)h; }

result zesInit(u32 flags) { return getenv("NO_DEVICE") ? UNSUPPORTED : OK; }
result zesDriverGet(u32 *n, handle *found) { return list(n, found, 1); }
result zesDeviceGet(handle d, u32 *n, handle *found) { return list(n, found, 1); }
result zesDeviceGetProperties(handle d, properties *p) {
    if (p->stype != 0x1) return UNSUPPORTED;
    for (int i = 0; i < 16; i++) p->core.uuid[i] = i;
    strcpy(p->core.name, "Intel GPU Max 1550");
    strcpy(p->driver, "1.6.3");
    return OK;
}
result zesDeviceEnumMemoryModules(handle d, u32 *n, handle *found) { return list(n, found, 2); }
result zesMemoryGetState(handle m, memory *s) {
    if (s->stype != 0x1e) return UNSUPPORTED;
    s->size = 64; s->free = of(m) ? 24 : 4;
    return OK;
}
result zesDeviceEnumEngineGroups(handle d, u32 *n, handle *found) { return list(n, found, 2); }
result zesEngineGetProperties(handle e, part *p) { p->type = 1; p->on_subdevice = of(e); return OK; }
result zesEngineGetActivity(handle e, counter *c) {
    reads++;  /* one million microseconds a read, of which a quarter is busy */
    c->timestamp = reads * 1000000; c->value = reads * 250000;
    return OK;
}
result zesDeviceGetCardPowerDomain(handle d, handle *found) { *found = &parts[0]; return OK; }
result zesPowerGetEnergyCounter(handle p, counter *c) {
    static u64 seconds;
    seconds++;
    c->timestamp = seconds * 1000000; c->value = seconds * 300 * 1000000;
    return OK;
}
result zesDeviceEnumTemperatureSensors(handle d, u32 *n, handle *found) { return list(n, found, 1); }
result zesTemperatureGetProperties(handle t, part *p) { p->type = 1; p->on_subdevice = 0; return OK; }
result zesTemperatureGetState(handle t, double *celsius) { *celsius = 55.5; return OK; }
result zesDeviceEnumFrequencyDomains(handle d, u32 *n, handle *found) { return list(n, found, 2); }
result zesFrequencyGetState(handle f, frequency *s) { s->reasons = of(f) ? 8 : 2; return OK; }
result zesDevicePciGetStats(handle d, pci_stats *s) {
    static u64 seconds;
    seconds++;
    s->timestamp = seconds * 1000000; s->rx = seconds * 100; s->tx = seconds * 50;
    return OK;
}
result zesDevicePciGetProperties(handle d, pci_properties *p) { p->most = (speed){5, 16, 0}; return OK; }
result zesDeviceEnumRasErrorSets(handle d, u32 *n, handle *found) { return list(n, found, 2); }
result zesRasGetProperties(handle r, part *p) { p->type = of(r); p->on_subdevice = 0; return OK; }
result zesRasGetState(handle r, u32 clear, errors *e) {
    if (clear || e->stype != 0x22) return UNSUPPORTED;
    e->category[0] = 2; e->category[6] = 3;
    return OK;
}
result zesDeviceProcessesGetState(handle d, u32 *n, process *found) {
    if (found) for (u32 i = 0; i < *n; i++) { found[i].pid = 100 + i; found[i].memory = 7 + i; }
    *n = 2;
    return OK;
}
