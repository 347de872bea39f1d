/* As much of libnvidia-ml.so.1 as zeromon reads: one H100 whose figures a test can tell. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
typedef void *handle;
enum { OK = 0, NOT_SUPPORTED = 3, TIMEOUT = 10 };

typedef struct { uint64_t total, free, used; } memory;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { handle device; uint64_t type, data; unsigned gpu, compute; } event;
typedef struct { unsigned pid; uint64_t used; unsigned gpu, compute; } process;
typedef struct { unsigned id; result status; double value; struct { char *a, *b, *c; } info; } metric;
typedef struct { unsigned version, count; long *first, *second; metric metrics[]; } metrics;

static int device, events, xids = 1;
static long samples[8], taken;

result nvmlInitWithFlags(unsigned flags) { return OK; }
result nvmlInit_v2(void) { return OK; }
char *nvmlErrorString(result r) { return "stub"; }
result nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "575.57", n); return OK; }
result nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return OK; }
result nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *d) { *d = &device; return OK; }
result nvmlDeviceGetUUID(handle d, char *text, unsigned n) { strncpy(text, "GPU-AA-BB", n); return OK; }
result nvmlDeviceGetName(handle d, char *text, unsigned n) { strncpy(text, "NVIDIA H100", n); return OK; }
result nvmlDeviceGetMemoryInfo(handle d, memory *m) { *m = (memory){80, 50, 30}; return OK; }
result nvmlDeviceGetUtilizationRates(handle d, utilization *u) { *u = (utilization){75, 40}; return OK; }
result nvmlDeviceGetPowerUsage(handle d, unsigned *milliwatts) { *milliwatts = 456000; return OK; }
result nvmlDeviceGetTotalEnergyConsumption(handle d, uint64_t *millijoules) { *millijoules = 9000; return OK; }
result nvmlDeviceGetTemperature(handle d, int sensor, unsigned *celsius) { *celsius = 61; return OK; }
result nvmlDeviceGetPcieThroughput(handle d, int way, unsigned *kib) { *kib = way ? 2 : 1; return OK; }
result nvmlDeviceGetCurrentClocksThrottleReasons(handle d, uint64_t *mask) { *mask = 0x4 | 0x40; return OK; }
result nvmlDeviceGetTotalEccErrors(handle d, int type, int counter, uint64_t *n) { *n = 7; return OK; }
result nvmlDeviceGetMaxPcieLinkGeneration(handle d, unsigned *n) { *n = 5; return OK; }
result nvmlDeviceGetMaxPcieLinkWidth(handle d, unsigned *n) { *n = 16; return OK; }
result nvmlDeviceGetComputeRunningProcesses_v3(handle d, unsigned *n, process *found) {
    if (*n < 2) { *n = 2; return 7; }
    *n = 2;
    found[0] = (process){100, 12, 0, 0};
    found[1] = (process){200, 18, 0, 0};
    return OK;
}

result nvmlEventSetCreate(handle *set) { *set = &events; return OK; }
result nvmlDeviceRegisterEvents(handle d, uint64_t kinds, handle set) { return kinds == 8 ? OK : NOT_SUPPORTED; }
result nvmlEventSetWait_v2(handle set, event *e, unsigned ms) {
    if (!xids) return TIMEOUT;
    xids = 0;
    *e = (event){&device, 8, 79, 0, 0};
    return OK;
}

result nvmlGpmQueryDeviceSupport(handle d, unsigned *support) { support[1] = !getenv("NO_GPM"); return OK; }
result nvmlGpmSampleAlloc(long **sample) {
    for (int i = 0; i < 8; i++)
        if (!samples[i]) { samples[i] = -1; *sample = &samples[i]; return OK; }
    return NOT_SUPPORTED;  /* all are kept: the reader frees none */
}
result nvmlGpmSampleFree(long *sample) { *sample = 0; return OK; }
result nvmlGpmSampleGet(handle d, long *sample) { *sample = ++taken; return OK; }
result nvmlGpmMetricsGet(metrics *m) {
    for (unsigned i = 0; i < m->count; i++) {
        m->metrics[i].status = m->metrics[i].id == 10 ? NOT_SUPPORTED : OK;
        m->metrics[i].value = 10 * m->metrics[i].id * (*m->second - *m->first);
    }
    return m->version == 1 ? OK : NOT_SUPPORTED;
}
