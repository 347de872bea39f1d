#include "values.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

#include "memory.h"

namespace vgpu {
namespace {

using Address = std::uintptr_t;
constexpr std::size_t kLargestKnown = 1 << 20;
constexpr int kMostElements = 64;

// Memory is used again, and where a kernel writes is not known: each of unknown result ends all belief.
std::mutex ranges_lock;
std::map<Address, Address> ranges;  // start to end of what is known, disjoint
std::atomic<bool> is_behind_collective{false};

bool is_arithmetic() {
  static const bool on = std::getenv("VGPU_ARITHMETIC") && *std::getenv("VGPU_ARITHMETIC");
  return on;
}

Address address_of(const void* start) { return reinterpret_cast<Address>(start); }

// Forgets the part of all ranges from `start` to `end`.
void cut(Address start, Address end) {
  auto at = ranges.upper_bound(start);
  if (at != ranges.begin()) --at;
  while (at != ranges.end() && at->first < end) {
    auto [from, until] = *at;
    if (until <= start) {
      ++at;
      continue;
    }
    at = ranges.erase(at);
    if (from < start) ranges[from] = start;
    if (until > end) at = ranges.insert({end, until}).first;
  }
}

bool is_known(const void* start, std::size_t bytes) {
  if (is_behind_collective) return true;  // what it received, and copies of that
  std::lock_guard<std::mutex> held(ranges_lock);
  Address from = address_of(start), end = from + bytes;
  auto at = ranges.upper_bound(from);
  if (at == ranges.begin()) return false;
  for (--at; from < end; ++at) {
    if (at == ranges.end() || at->first > from || at->second <= from) return false;
    from = at->second;
  }
  return true;
}

void note(const void* start, std::size_t bytes, bool known) {
  std::lock_guard<std::mutex> held(ranges_lock);
  Address from = address_of(start);
  cut(from, from + bytes);
  if (known && bytes <= kLargestKnown) ranges[from] = from + bytes;
}

class Work : public Action {
public:
  explicit Work(std::function<void()> work) : work_(std::move(work)) {}
  bool move() override {
    work_();
    return true;
  }
  std::unique_ptr<Action> copy() const override { return std::make_unique<Work>(work_); }

private:
  std::function<void()> work_;
};

// The number behind a part of a mangled name, or 0.
long number_after(const char* name, const char* part) {
  const char* found = std::strstr(name, part);
  return found ? std::strtol(found + std::strlen(part), nullptr, 10) : 0;
}

std::size_t size_of_type(const char* mangled) {
  switch (*mangled) {
    case 'l':
    case 'd': return 8;
    case 'i':
    case 'f': return 4;
    case 's': return 2;
    case 'b':
    case 'a':
    case 'h': return 1;
    default:
      bool is_half = !std::strncmp(mangled, "N3c104HalfE", 11) || !std::strncmp(mangled, "N3c108BFl", 9);
      return is_half ? 2 : 0;
  }
}

// Orders of CompareFunctor (at least, above, at most, below) and of CompareEqFunctor (equal, unequal).
template <class T>
bool holds(int order, bool for_equality, T left, T right) {
  if (for_equality) return (left == right) == (order == 0);
  return order == 0   ? left >= right
         : order == 1 ? left > right
         : order == 2 ? left <= right
                      : left < right;
}

using Comparison = bool (*)(int, bool, const char*, const char*);
template <class T>
bool compare(int order, bool for_equality, const char* left, const char* right) {
  T a, b;
  std::memcpy(&a, left, sizeof a);
  std::memcpy(&b, right, sizeof b);
  return holds(order, for_equality, a, b);
}

Comparison comparison_of(char type) {
  switch (type) {
    case 'l': return compare<std::int64_t>;
    case 'i': return compare<std::int32_t>;
    case 's': return compare<std::int16_t>;
    case 'd': return compare<double>;
    case 'f': return compare<float>;
    case 'a': return compare<std::int8_t>;
    case 'b':
    case 'h': return compare<std::uint8_t>;
    default: return nullptr;
  }
}

using Sum = void (*)(char*, const char*, const char*, const char*);
// out = left + alpha * right; for one known number, out = left + right * alpha as well.
template <class T>
void add(char* out, const char* left, const char* right, const char* alpha) {
  T a, b, factor;
  std::memcpy(&a, left, sizeof a);
  std::memcpy(&b, right, sizeof b);
  std::memcpy(&factor, alpha, sizeof factor);
  a = static_cast<T>(a + factor * b);
  std::memcpy(out, &a, sizeof a);
}

Sum sum_of(char type) {
  switch (type) {
    case 'l': return add<std::int64_t>;
    case 'i': return add<std::int32_t>;
    case 'd': return add<double>;
    case 'f': return add<float>;
    default: return nullptr;
  }
}

// CUDAFunctor_add (its alpha) of two tensors, and CUDAFunctorOnSelf_add (number, alpha) of one.
std::unique_ptr<Action> addition(const char* type, bool on_self, char** data, std::size_t elements,
                                 const char* functor) {
  Sum sum = sum_of(*type);
  std::size_t width = size_of_type(type), bytes = width * elements;
  if (!sum || !is_known(data[1], bytes) || (!on_self && !is_known(data[2], bytes))) return nullptr;
  note(data[0], bytes, true);
  char *out = data[0], *left = data[1], *right = on_self ? nullptr : data[2];
  std::string numbers(functor, on_self ? 2 * width : width);
  return std::make_unique<Work>([=] {
    const char* alpha = numbers.data() + (on_self ? width : 0);
    for (std::size_t i = 0; i < elements; ++i)
      sum(out + i * width, left + i * width, on_self ? numbers.data() : right + i * width, alpha);
  });
}

// vectorized_elementwise_kernel and unrolled_elementwise_kernel: elements, functor, pointers.
std::unique_ptr<Action> elementwise(const char* name, void** args) {
  int count = *static_cast<int*>(args[0]);
  long pointers = std::max(number_after(name, "IPcLm"), number_after(name, "IPcLi"));
  if (count > kMostElements || pointers < 1 || pointers > 8) return nullptr;
  auto elements = static_cast<std::size_t>(count);
  auto* data = static_cast<char**>(args[2]);
  char* out = data[0];
  static const char kFill[] = "elementwise_kernelILi", kFillName[] = "11FillFunctorI";
  const char* fill = std::strstr(name, kFillName);
  std::size_t size = fill && pointers == 1 ? size_of_type(fill + sizeof kFillName - 1) : 0;
  if (size && std::strstr(name, kFill)) {
    note(out, elements * size, true);
    std::string value(static_cast<char*>(args[1]), size);
    return std::make_unique<Work>([=] {
      for (std::size_t i = 0; i < elements; ++i)
        std::memcpy(out + i * size, value.data(), size);
    });
  }
  const char* order = std::strstr(name, "CompareFunctorI");
  const char* equality = std::strstr(name, "CompareEqFunctorI");
  const char* type = order ? order + 15 : equality ? equality + 17 : nullptr;
  bool is_plain = !std::strstr(name, "UnaryFunctor") && !std::strstr(name, "LoadWithCast");
  Comparison comparison = type && is_plain && pointers == 3 ? comparison_of(*type) : nullptr;
  if (comparison) {
    std::size_t width = size_of_type(type);
    if (is_known(data[1], width * elements) && is_known(data[2], width * elements)) {
      note(out, elements, true);
      const char *left = data[1], *right = data[2];
      int which = *static_cast<int*>(args[1]);
      return std::make_unique<Work>([=] {
        for (std::size_t i = 0; i < elements; ++i)
          out[i] = comparison(which, equality != nullptr, left + i * width, right + i * width);
      });
    }
  }
  const char* added = std::strstr(name, "15CUDAFunctor_addI");
  const char* added_number = std::strstr(name, "21CUDAFunctorOnSelf_addI");
  if ((added && pointers == 3) || (added_number && pointers == 2)) {
    const char* of = added ? added + 18 : added_number + 24;
    auto work = addition(of, !added, data, elements, static_cast<char*>(args[1]));
    if (work) return work;
  }
  // Unknown: nothing that an earlier tensor left may go into a collective. In place, the bytes are the
  // tensor's own. A new tensor begins at a block of torch's allocator.
  forget_values();
  bool is_new = address_of(out) % 512 == 0;
  for (long i = 1; i < pointers; ++i)
    is_new = is_new && data[i] != out;
  if (!is_new) return nullptr;
  return std::make_unique<Work>([=] { std::memset(out, 0, elements * 8); });
}

bool is_on_device(const void* address) {
  Block block;
  return find_block(address, &block) && block.place == Place::device;
}

// reduce_kernel of int64, such as a sum of sizes. Its ReduceOp has the neutral element, then element
// size and numbers of inputs and outputs.
std::unique_ptr<Action> integer_sum(void** args) {
  auto* op = static_cast<const char*>(args[0]);
  int sizes[3];
  std::memcpy(sizes, op + 16, sizeof sizes);
  auto inputs = static_cast<std::size_t>(sizes[1]);
  if (sizes[0] != 8 || inputs > kMostElements || sizes[2] != 1) return nullptr;
  // Input and output, a second output, then three buffers and the base index: zero for a sum of one
  // block; accumulate, final_output, and one output. What is before them is not all initialized.
  static const std::int64_t kNothing[4] = {};
  void* pointers[2];
  std::size_t at = 88;
  for (;; at += 8) {
    if (at > 1024) return nullptr;
    int outputs;
    std::memcpy(&outputs, op + at + 60, sizeof outputs);
    bool fits = !std::memcmp(op + at + 24, kNothing, sizeof kNothing) && !op[at + 56] &&
                op[at + 57] == 1 && outputs == 1;
    std::memcpy(pointers, op + at, sizeof pointers);
    if (fits && is_on_device(pointers[0]) && is_on_device(pointers[1])) break;
  }
  if (!is_known(pointers[0], inputs * 8)) return nullptr;
  note(pointers[1], 8, true);
  auto* from = static_cast<const std::int64_t*>(pointers[0]);
  auto* to = static_cast<std::int64_t*>(pointers[1]);
  return std::make_unique<Work>([=] {
    std::int64_t total = 0;
    for (std::size_t i = 0; i < inputs; ++i)
      total += from[i];
    *to = total;
  });
}

// CatArrayBatchedCopy of one dimension: output; then of each input its pointer, offset, size along the
// dimension and number of elements.
std::unique_ptr<Action> concatenation(const char* name, unsigned inputs, void** args) {
  auto size = static_cast<std::size_t>(number_after(name, "OpaqueTypeILj"));
  auto batch = static_cast<std::size_t>(number_after(name, "EEEjLi1ELi"));
  if (!size || !batch || inputs > batch || std::strstr(name, "_vectorized")) return nullptr;
  auto* out = *static_cast<char**>(args[0]);
  auto* from = static_cast<const char**>(args[1]);
  auto* offset = reinterpret_cast<const unsigned*>(from + batch);
  const unsigned* elements = offset + 2 * batch;
  struct Part {
    char* to;
    const char* from;
    std::size_t bytes;
  };
  std::vector<Part> parts;
  std::size_t total = 0;
  for (unsigned i = 0; i < inputs; ++i) {
    parts.push_back({out + offset[i] * size, from[i], elements[i] * size});
    total += parts.back().bytes;
  }
  if (total > kLargestKnown) return nullptr;
  for (const Part& part : parts)
    note_copied(part.to, part.from, part.bytes);
  return std::make_unique<Work>([parts] {
    for (const Part& part : parts)
      std::memcpy(part.to, part.from, part.bytes);
  });
}

}  // namespace

void forget_values() {
  is_behind_collective = false;
  std::lock_guard<std::mutex> held(ranges_lock);
  ranges.clear();
}

void note_written(const void* start, std::size_t bytes) { note(start, bytes, true); }

void note_copied(const void* to, const void* from, std::size_t bytes) {
  note(to, bytes, is_known(from, bytes));
}

void note_collective(std::size_t bytes) { is_behind_collective = bytes <= kLargestKnown; }

std::unique_ptr<Action> small_kernel(const char* name, unsigned blocks_y, void** args) {
  static const char kPrefix[] = "_ZN2at6native";
  std::unique_ptr<Action> action;
  if (is_arithmetic()) return nullptr;
  if (args && !std::strncmp(name, kPrefix, sizeof kPrefix - 1)) {
    const char* rest = name + sizeof kPrefix - 1;
    if (!std::strncmp(rest, "29vectorized_elementwise_kernelI", 32) ||
        !std::strncmp(rest, "27unrolled_elementwise_kernelI", 30))
      return elementwise(name, args);
    if (!std::strncmp(rest, "13reduce_kernelI", 16) && std::strstr(rest, "sum_functorIlllE"))
      action = integer_sum(args);
    else if (std::strstr(rest, "CatArrayBatchedCopy"))
      action = concatenation(name, blocks_y, args);
  }
  return action;
}

const char* stand_in_for(const void* start, std::size_t bytes, const char* last_kernel) {
  static const char zeros[kLargestSmallRead] = {};
  static const char one[8] = {1};
  if (bytes > kLargestSmallRead || is_arithmetic() || is_known(start, bytes)) return nullptr;
  bool is_true = std::strstr(last_kernel, "and_kernel") || std::strstr(last_kernel, "MulFunctorIbE");
  return bytes == 8 || (bytes == 1 && is_true) ? one : zeros;
}

}  // namespace vgpu
