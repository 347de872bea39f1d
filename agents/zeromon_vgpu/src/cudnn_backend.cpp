// libcudnn's graphs: descriptors keep the attributes that they are given, a heuristic offers an engine
// with tensor cores and one without, and a plan takes the time of the graph's products and tensors.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "cudnn.h"
#include "machine.h"

using namespace cudnn;

namespace {

// Numbers of cudnnBackendDescriptorType_t.
enum ObjectType {
  engine_object = 2,
  configuration_object = 3,
  heuristic_object = 4,
  plan_object = 5,
  convolution_forward = 10,
  convolution_backward_filter = 11,
  convolution_backward_data = 12,
  pointwise_operation = 13,
  graph_object = 15,
  tensor_object = 17,
  product_operation = 19,
  reduction_operation = 22,
  reshape_operation = 31,
  random_operation = 33,
  attention_forward = 41,
  attention_backward = 43,
  band_mask_operation = 44,
  softmax_operation = 45
};

// Numbers of cudnnBackendAttributeName_t.
enum Attribute {
  pointwise_mode = 0,
  heuristic_mode = 200,
  heuristic_graph = 201,
  heuristic_results = 202,
  configuration_engine = 300,
  configuration_workspace = 303,
  configuration_shared_memory = 304,
  plan_configuration = 401,
  plan_workspace = 402,
  forward_w = 703,
  forward_x = 704,
  forward_y = 705,
  backward_data_w = 709,
  backward_data_x = 710,
  backward_data_y = 711,
  backward_filter_w = 715,
  backward_filter_x = 716,
  backward_filter_y = 717,
  pointwise_description = 750,
  graph_operations = 801,
  graph_engines = 802,
  tensor_type = 901,
  tensor_sizes = 902,
  tensor_strides = 903,
  tensor_id = 906,
  tensor_is_virtual = 907,
  tensor_is_by_value = 908,
  engine_graph = 1300,
  engine_index = 1301,
  engine_notes = 1303,
  product_a = 1520,
  product_c = 1522,
  attention_forward_q = 2800,
  attention_score_graph = 2811,
  attention_backward_q = 2851,
  band_mask_comparison = 3007
};

constexpr int kDescriptors = 15;      // CUDNN_TYPE_BACKEND_DESCRIPTOR
constexpr int kTensorCoreNote = 0;    // CUDNN_NUMERICAL_NOTE_TENSOR_CORE
constexpr int kGreaterOrEqual = 303;  // CUDNN_POINTWISE_CMP_GE
constexpr int kFallback = 2;          // CUDNN_HEUR_MODE_FALLBACK
constexpr std::int64_t kEngines = 2;  // 0: without tensor cores, 1: with them

// What cuDNN's attention reaches of the speed of products on an H100, in the figures of FlashAttention-3
// (arXiv:2407.08608) for 8,192 tokens without a mask: of 785 TFLOP/s, 600 forward and 518 backward with
// heads of 128, and 412 and 432 with heads of 64.
double attention_efficiency(double head_size, bool backward) {
  if (head_size <= 64) return backward ? 0.55 : 0.52;
  return backward ? 0.66 : 0.76;
}

struct Object;
using ObjectRef = std::shared_ptr<Object>;

struct Value {
  std::int64_t count = 0;
  std::string bytes;
  std::vector<ObjectRef> objects;
};

struct Object {
  int type;
  std::map<int, Value> values;

  const Value* find(int name) const {
    auto found = values.find(name);
    return found == values.end() ? nullptr : &found->second;
  }
  Object* object(int name) const {
    const Value* value = find(name);
    return value && !value->objects.empty() ? value->objects[0].get() : nullptr;
  }
  template <class T>
  T number(int name, T otherwise) const {
    const Value* value = find(name);
    if (value && value->bytes.size() >= sizeof(T))
      std::memcpy(&otherwise, value->bytes.data(), sizeof(T));
    return otherwise;
  }
  std::vector<std::int64_t> list(int name) const {
    const Value* value = find(name);
    std::vector<std::int64_t> numbers(value ? value->bytes.size() / 8 : 0);
    if (!numbers.empty()) std::memcpy(numbers.data(), value->bytes.data(), numbers.size() * 8);
    return numbers;
  }
};

// What the caller holds: the same object is filled in where the interface returns one.
struct Descriptor {
  ObjectRef object;
};

std::size_t element_size(int attribute_type) {
  switch (attribute_type) {
    case 2:
    case 24: return 1;  // truths, letters
    case 0:
    case 3:
    case 5:
    case 6:
    case kDescriptors: return 8;  // handles, numbers and pointers of 64 bits
    case 26: return 16;           // fractions
    default: return 4;            // enumerations and numbers of 32 bits
  }
}

ObjectRef make_object(int type) { return std::make_shared<Object>(Object{type, {}}); }

void set_number(Object& object, int name, std::int64_t number) {
  object.values[name] = {1, std::string(reinterpret_cast<const char*>(&number), sizeof number), {}};
}

void set_object(Object& object, int name, ObjectRef other) { object.values[name] = {1, {}, {other}}; }

Tensor tensor_of(const Object* object) {
  if (!object) return {};
  return {object->number<int>(tensor_type, f32), object->list(tensor_sizes),
          object->list(tensor_strides)};
}

double dimension(const Tensor& tensor, std::size_t from_last) {
  return tensor.sizes.size() < from_last
             ? 1
             : static_cast<double>(tensor.sizes[tensor.sizes.size() - from_last]);
}

// ---- graphs
// --------------------------------------------------------------------------------------------

// Operations of a graph, and what they read and write of the device's memory.
struct Work {
  double flops = 0, bytes = 0, head_size = 0;
  int type = f32;    // of the operands of the first product
  int products = 0;  // beside a convolution
  bool causal = false;
  std::unique_ptr<Convolution> convolution;
};

void add_tensors(const Object& operation, std::set<std::int64_t>& seen, Work& work) {
  for (const auto& [name, value] : operation.values)
    for (const ObjectRef& object : value.objects) {
      if (object->type != tensor_object || object->number<bool>(tensor_is_virtual, false) ||
          object->number<bool>(tensor_is_by_value, false) ||
          !seen.insert(object->number<std::int64_t>(tensor_id, 0)).second)
        continue;
      work.bytes += tensor_of(object.get()).bytes();
    }
}

void add_convolution(const Object& operation, Pass pass, int x, int w, int y, Work& work) {
  work.convolution.reset(new Convolution{pass, tensor_of(operation.object(x)),
                                         tensor_of(operation.object(w)), tensor_of(operation.object(y)),
                                         true});
  work.type = work.convolution->x.type;
}

// Attention as one operation: the forward is two products, the backward five.
void add_attention(const Object& operation, int q, bool backward, Work& work) {
  Tensor queries = tensor_of(operation.object(q)), keys = tensor_of(operation.object(q + 1)),
         values = tensor_of(operation.object(q + 2));
  double heads = queries.elements() / dimension(queries, 1);
  double sizes = backward ? 3 * dimension(keys, 1) + 2 * dimension(values, 1)
                          : dimension(keys, 1) + dimension(values, 1);
  work.flops += 2 * heads * dimension(keys, 2) * sizes;
  work.products += backward ? 5 : 2;
  work.type = queries.type;
  work.head_size = dimension(queries, 1);
}

// The first product of attention is that of queries and keys: its rows are heads.
void add_product(const Object& operation, Work& work) {
  Tensor a = tensor_of(operation.object(product_a));
  work.flops += 2 * tensor_of(operation.object(product_c)).elements() * dimension(a, 1);
  if (!work.products++) work.type = a.type, work.head_size = dimension(a, 1);
}

// A comparison of the indices of rows and columns masks half of the scores; one with a length does not.
bool is_causal(const Object& operation) {
  const Object* description = operation.object(pointwise_description);
  int mode = description ? description->number<int>(pointwise_mode, 0)
                         : operation.number<int>(band_mask_comparison, 0);
  return mode == kGreaterOrEqual;
}

const std::vector<ObjectRef>& operations_of(const Object* graph) {
  static const std::vector<ObjectRef> kNone;
  const Value* operations = graph ? graph->find(graph_operations) : nullptr;
  return operations ? operations->objects : kNone;
}

void add_operation(const Object& operation, Work& work) {
  switch (operation.type) {
    case convolution_forward:
      return add_convolution(operation, Pass::forward, forward_x, forward_w, forward_y, work);
    case convolution_backward_data:
      return add_convolution(operation, Pass::backward_data, backward_data_x, backward_data_w,
                             backward_data_y, work);
    case convolution_backward_filter:
      return add_convolution(operation, Pass::backward_filter, backward_filter_x, backward_filter_w,
                             backward_filter_y, work);
    case attention_forward: return add_attention(operation, attention_forward_q, false, work);
    case attention_backward: return add_attention(operation, attention_backward_q, true, work);
    case product_operation: return add_product(operation, work);
    default: work.causal |= is_causal(operation);
  }
}

Work work_of(const Object& graph) {
  Work work;
  std::set<std::int64_t> seen;
  for (const ObjectRef& operation : operations_of(&graph)) {
    add_tensors(*operation, seen, work);
    add_operation(*operation, work);
    // Attention as one operation has a graph of its own that changes the scores
    for (const ObjectRef& change : operations_of(operation->object(attention_score_graph)))
      work.causal |= is_causal(*change);
  }
  if (work.causal) work.flops /= 2;
  return work;
}

bool has_model(const Object& graph) {
  static const std::set<int> kKnown = {
      convolution_forward, convolution_backward_filter, convolution_backward_data, pointwise_operation,
      product_operation,   reduction_operation,         reshape_operation,         random_operation,
      attention_forward,   attention_backward,          band_mask_operation,       softmax_operation};
  const std::vector<ObjectRef>& operations = operations_of(&graph);
  return !operations.empty() &&
         std::all_of(operations.begin(), operations.end(),
                     [](const ObjectRef& operation) { return kKnown.count(operation->type) != 0; });
}

// ---- engines and plans
// ---------------------------------------------------------------------------------

ObjectRef make_configuration(const ObjectRef& graph, std::int64_t index) {
  ObjectRef engine = make_object(engine_object), configuration = make_object(configuration_object);
  set_object(*engine, engine_graph, graph);
  set_number(*engine, engine_index, index);
  set_object(*configuration, configuration_engine, engine);
  return configuration;
}

// The engine of a plan or of a configuration.
const Object* engine_of(const Object& object) {
  const Object* configuration = object.type == plan_object ? object.object(plan_configuration) : &object;
  return configuration ? configuration->object(configuration_engine) : nullptr;
}

bool uses_tensor_cores(const Object& engine, const Work& work) {
  return engine.number<std::int64_t>(engine_index, 0) == 1 && has_tensor_cores(work.type);
}

std::int64_t workspace_of(const Object& object) {
  const Object* engine = engine_of(object);
  if (!engine || !engine->object(engine_graph)) return 0;
  Work work = work_of(*engine->object(engine_graph));
  if (!work.convolution) return 0;
  work.convolution->tensor_cores = uses_tensor_cores(*engine, work);
  return work.convolution->workspace();
}

// Values that are computed when they are asked for; false where an object keeps what it was given.
bool computed_value(const Descriptor* descriptor, int name, Value* value) {
  const Object& object = *descriptor->object;
  Object computed{0, {}};
  if (name == heuristic_results) {
    const Value* graph = object.find(heuristic_graph);
    // Best first, or what always works first
    bool fallback = object.number<int>(heuristic_mode, 0) == kFallback;
    for (std::int64_t i = 0; graph && i < kEngines; ++i)
      value->objects.push_back(make_configuration(graph->objects[0], fallback ? i : kEngines - 1 - i));
    value->count = static_cast<std::int64_t>(value->objects.size());
    return true;
  }
  if (name == engine_notes) {
    bool tensor_cores = object.number<std::int64_t>(engine_index, 0) == 1;
    *value = {tensor_cores, std::string(tensor_cores ? 4 : 0, static_cast<char>(kTensorCoreNote)), {}};
    return true;
  }
  if (name == plan_workspace || name == configuration_workspace)
    set_number(computed, name, workspace_of(object));
  else if (name == graph_engines)
    set_number(computed, name, kEngines);
  else if (name == configuration_shared_memory)
    set_number(computed, name, 0);
  else
    return false;
  *value = computed.values[name];
  return true;
}

}  // namespace

VGPU_API int cudnnBackendCreateDescriptor(int type, Descriptor** out) {
  *out = new Descriptor{make_object(type)};
  return success;
}

VGPU_API int cudnnBackendDestroyDescriptor(Descriptor* descriptor) {
  delete descriptor;
  return success;
}

VGPU_API int cudnnBackendInitialize(Descriptor*) { return success; }

VGPU_API int cudnnBackendFinalize(Descriptor* descriptor) {
  const Object& object = *descriptor->object;
  if (object.type != graph_object || has_model(object)) return success;
  vgpu::complain("cudnnBackendFinalize", "the graph has an operation without a model");
  return not_supported;
}

VGPU_API int cudnnBackendSetAttribute(Descriptor* descriptor, int name, int type, std::int64_t count,
                                      const void* elements) {
  Value value{count, {}, {}};
  if (type == kDescriptors) {
    auto* given = static_cast<Descriptor* const*>(elements);
    for (std::int64_t i = 0; i < count; ++i)
      value.objects.push_back(given[i]->object);
  } else {
    value.bytes.assign(static_cast<const char*>(elements),
                       static_cast<std::size_t>(count) * element_size(type));
  }
  descriptor->object->values[name] = value;
  return success;
}

VGPU_API int cudnnBackendGetAttribute(const Descriptor* descriptor, int name, int type,
                                      std::int64_t limit, std::int64_t* count, void* elements) {
  Value value;
  const Value* kept = descriptor->object->find(name);
  if (!computed_value(descriptor, name, &value) && kept) value = *kept;
  // A caller that asks for one result takes the count for what it got
  if (count) *count = elements ? std::min(limit, value.count) : value.count;
  if (!elements) return success;
  if (type == kDescriptors) {
    auto* given = static_cast<Descriptor**>(elements);
    for (std::int64_t i = 0; i < std::min(limit, value.count); ++i)
      if (given[i]) given[i]->object = value.objects[static_cast<std::size_t>(i)];
  } else {
    std::size_t bytes = static_cast<std::size_t>(limit) * element_size(type);
    std::memcpy(elements, value.bytes.data(), std::min(value.bytes.size(), bytes));
  }
  return success;
}

VGPU_API int cudnnBackendExecute(Handle* handle, const Descriptor* plan, const Descriptor*) {
  const Object* engine = engine_of(*plan->object);
  const Object* graph = engine ? engine->object(engine_graph) : nullptr;
  if (!graph) return bad_param;
  Work work = work_of(*graph);
  bool tensor_cores = uses_tensor_cores(*engine, work);
  if (work.convolution) {
    work.convolution->tensor_cores = tensor_cores;
    const Convolution& convolution = *work.convolution;
    double own_bytes = convolution.x.bytes() + convolution.w.bytes() + convolution.y.bytes();
    launch_convolution(handle, convolution, std::max(0.0, work.bytes - own_bytes));
    return success;
  }
  bool backward = work.products > 2;
  const char* name = !work.products ? "cudnn_generated_elementwise_vgpu"
                     : backward     ? "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_vgpu"
                                    : "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_vgpu";
  launch_work(handle, name, work.flops, product_speed(work.type, tensor_cores), work.bytes,
              attention_efficiency(work.head_size, backward));
  return success;
}
