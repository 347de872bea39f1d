// libnccl: element types, reductions, and the memory of other ranks.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "nccl.h"

namespace nccl {
namespace {

constexpr std::size_t kChunk = 1 << 18;  // elements at a time: scratch memory stays small

struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};
template <int kExponentBits>
struct Float8 {
  std::uint8_t bits;
};

float widen(Half value) {
  _Float16 half;
  std::memcpy(&half, &value, 2);
  return static_cast<float>(half);
}
void narrow(float value, Half* out) {
  auto half = static_cast<_Float16>(value);
  std::memcpy(out, &half, 2);
}

float widen(BFloat value) {
  std::uint32_t bits = std::uint32_t{value.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
void narrow(float value, BFloat* out) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) {
    out->bits = 0x7fc0;
    return;
  }
  bits += 0x7fff + ((bits >> 16) & 1);  // to nearest even
  out->bits = static_cast<std::uint16_t>(bits >> 16);
}

// E4M3 has no infinity and one NaN a sign; E5M2 is IEEE's.
template <int kExponentBits>
float widen(Float8<kExponentBits> value) {
  constexpr int mantissa_bits = 7 - kExponentBits, bias = (1 << (kExponentBits - 1)) - 1;
  int exponent = (value.bits & 0x7f) >> mantissa_bits;
  int mantissa = value.bits & ((1 << mantissa_bits) - 1);
  float sign = value.bits & 0x80 ? -1.f : 1.f;
  if (kExponentBits == 4 && (value.bits & 0x7f) == 0x7f) return NAN;
  if (kExponentBits == 5 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
  float fraction = static_cast<float>(mantissa) / (1 << mantissa_bits);
  return sign * (exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias));
}
// The nearest of the 256 values, ties to the even code; above the largest it saturates.
template <int kExponentBits>
void narrow(float value, Float8<kExponentBits>* out) {
  if (std::isnan(value)) {
    out->bits = 0x7f;
    return;
  }
  std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  float wanted = std::fabs(value), best = INFINITY;
  for (std::uint8_t code = 0; code < 0x7f; ++code) {
    float distance = std::fabs(widen(Float8<kExponentBits>{code}) - wanted);
    if (!(distance < best || (distance == best && code % 2 == 0))) continue;
    best = distance;
    out->bits = sign | code;
  }
}

template <class T>
T widen(T value) {
  return value;
}
template <class T>
void narrow(T value, T* out) {
  *out = value;
}

template <class Wide>
Wide combine(Wide a, Wide b, int reduction) {
  switch (reduction) {
    case product: return static_cast<Wide>(a * b);
    case maximum: return std::max(a, b);
    case minimum: return std::min(a, b);
    default: return static_cast<Wide>(a + b);
  }
}

// value x size / running, to nearest for integers.
template <class Wide>
Wide scaled(Wide value, int size, int running) {
  if constexpr (std::is_floating_point_v<Wide>) {
    return static_cast<Wide>(static_cast<double>(value) * size / running);
  } else {
    __extension__ using Wider = __int128;
    Wider product = static_cast<Wider>(value) * size;
    return static_cast<Wide>((product + (product < 0 ? -running : running) / 2) / running);
  }
}

template <class T>
void reduce_as(const Comm& comm, const void* const* sources, std::size_t offset, std::size_t count,
               int reduction, T* out) {
  using Wide = decltype(widen(T{}));
  std::vector<T> part(std::min(count, kChunk));
  std::vector<Wide> total(part.size());
  auto custom = comm.scales.find(reduction);
  bool is_sum = reduction == sum || reduction >= first_custom;
  for (std::size_t begin = 0; begin < count; begin += kChunk) {
    std::size_t size = std::min(kChunk, count - begin);
    for (int place = 0; place < comm.places(); ++place) {
      const T* from = static_cast<const T*>(sources[place]) + offset + begin;
      pull(comm, place, part.data(), from, size * sizeof(T));
      for (std::size_t i = 0; i < size; ++i) {
        Wide value = widen(part[i]);
        if (custom != comm.scales.end()) value = static_cast<Wide>(value * custom->second);
        total[i] = place ? combine(total[i], value, reduction) : value;
      }
    }
    for (std::size_t i = 0; i < size; ++i) {
      if (reduction == average)
        total[i] = static_cast<Wide>(total[i] / static_cast<Wide>(comm.places()));
      if (is_sum && comm.size != comm.places()) total[i] = scaled(total[i], comm.size, comm.places());
      narrow(total[i], out + begin + i);
    }
  }
}

}  // namespace

std::size_t element_size(int type) {
  static const std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

bool read_scalar(const void* scalar, int type, double* out) {
  switch (type) {
    case 6: *out = widen(*static_cast<const Half*>(scalar)); return true;
    case 7: *out = *static_cast<const float*>(scalar); return true;
    case 8: *out = *static_cast<const double*>(scalar); return true;
    case 9: *out = widen(*static_cast<const BFloat*>(scalar)); return true;
    default: return false;
  }
}

bool pull(const Comm& comm, int place, void* to, const void* from, std::size_t bytes) {
  if (comm.shared->pid[place] == getpid()) {
    std::memcpy(to, from, bytes);
    return true;
  }
  std::size_t done = 0;
  while (done < bytes) {
    iovec local{static_cast<char*>(to) + done, bytes - done};
    iovec remote{static_cast<char*>(const_cast<void*>(from)) + done, bytes - done};
    ssize_t size = process_vm_readv(comm.shared->pid[place], &local, 1, &remote, 1, 0);
    if (size <= 0) {
      static std::atomic<bool> said{false};
      if (!said.exchange(true)) vgpu::complain("process_vm_readv", std::strerror(errno));
      return false;
    }
    done += static_cast<std::size_t>(size);
  }
  return true;
}

void reduce(const Comm& comm, const void* const* sources, std::size_t offset, std::size_t count,
            int type, int reduction, void* out) {
#define AS(T) return reduce_as(comm, sources, offset, count, reduction, static_cast<T*>(out))
  switch (type) {
    case 0: AS(std::int8_t);
    case 1: AS(std::uint8_t);
    case 2: AS(std::int32_t);
    case 3: AS(std::uint32_t);
    case 4: AS(std::int64_t);
    case 5: AS(std::uint64_t);
    case 6: AS(Half);
    case 7: AS(float);
    case 8: AS(double);
    case 9: AS(BFloat);
    case 10: AS(Float8<4>);
    case 11: AS(Float8<5>);
    default: vgpu::complain("ncclReduce", "unknown element type");
  }
#undef AS
}

}  // namespace nccl
