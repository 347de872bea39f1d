// libcudnn's recurrent layers, their dropout, and CTC losses: sizes of weights and spaces, and times.
#include <algorithm>

#include "cudnn.h"
#include "machine.h"

using namespace cudnn;

namespace {

// Numbers of cudnnRNNMode_t: ReLU, tanh, LSTM, GRU.
constexpr int kGates[] = {1, 1, 4, 3};
constexpr int kLstm = 2;
constexpr std::size_t kDropoutStates = 1 << 20;

struct Recurrent {
  int algorithm, mode, directions, type, math, input, hidden, projection, layers;
  int gates() const { return kGates[mode & 3]; }
  // The size of what a layer gives to the next step.
  int output() const { return projection && projection != hidden ? projection : hidden; }
  int input_of(int layer) const { return layer ? directions * output() : input; }
  bool is_projected() const { return output() != hidden; }
  // Elements of the matrices of one direction of a layer.
  double matrices(int layer) const {
    double inputs = input_of(layer) + output();
    return gates() * inputs * hidden + (is_projected() ? 1.0 * output() * hidden : 0);
  }
};

struct Sequences {
  int type = f32, longest = 0, batch = 0, width = 0;
  double steps = 0;  // of all sequences
};

double weights(const Recurrent& rnn) {
  double elements = 0;
  for (int layer = 0; layer < rnn.layers; ++layer)
    elements += rnn.directions * (rnn.matrices(layer) + 2.0 * rnn.gates() * rnn.hidden);
  return elements;
}

// Elements of a step, layer and direction that a backward reads: gates, output and cell.
double kept_elements(const Recurrent& rnn) {
  return rnn.gates() * rnn.hidden + rnn.output() + (rnn.mode == kLstm ? rnn.hidden : 0);
}

// All recurrent products of a layer and direction, one behind the other: a kernel a step, unless the
// algorithm keeps the weights in one kernel.
vgpu::Cost recurrence_cost(const Recurrent& rnn, const Sequences& x, double speed, int device) {
  double steps = std::max(x.longest, 1), columns = rnn.gates() * rnn.hidden;
  vgpu::Cost cost = vgpu::product_cost(x.steps / steps, columns, rnn.output(), 1, speed,
                                       element_bytes(rnn.type), device);
  double ns = static_cast<double>(cost.duration) * steps;
  if (rnn.algorithm) ns -= vgpu::machine().kernel_ns * (steps - 1);
  cost.duration = static_cast<vgpu::Time>(ns);
  cost.bytes = static_cast<std::int64_t>(static_cast<double>(cost.bytes) * steps);
  cost.tensor_seconds *= steps;
  return cost;
}

double speed_of(const Recurrent& rnn) {
  return product_speed(rnn.type, has_tensor_cores(rnn.type) && rnn.math != 3);  // 3: CUDNN_FMA_MATH
}

// A direction of a layer: the product of a whole sequence with the input matrices, then the recurrence.
int run(const Handle* handle, const Recurrent* rnn, const Sequences* x) {
  vgpu::Stream* stream = vgpu::stream_of(handle->stream);
  double speed = speed_of(*rnn);
  for (int i = 0; i < rnn->layers * rnn->directions; ++i) {
    vgpu::Call call("cudaLaunchKernel", 211);
    vgpu::launch(
        stream, "sm90_xmma_gemm_rnn_inputs_vgpu",
        vgpu::product_cost(x->steps, rnn->gates() * rnn->hidden, rnn->input_of(i / rnn->directions), 1,
                           speed, element_bytes(rnn->type), stream->device));
    vgpu::launch(stream, rnn->algorithm ? "RNN_blockPersist_vgpu" : "RNN_steps_vgpu",
                 recurrence_cost(*rnn, *x, speed, stream->device));
  }
  return success;
}

}  // namespace

// ---- dropout
// -------------------------------------------------------------------------------------------

VGPU_API int cudnnCreateDropoutDescriptor(char** out) {
  *out = new char;
  return success;
}
VGPU_API int cudnnDestroyDropoutDescriptor(char* dropout) {
  delete dropout;
  return success;
}
VGPU_API int cudnnDropoutGetStatesSize(Handle*, std::size_t* bytes) {
  *bytes = kDropoutStates;
  return success;
}
VGPU_API int cudnnSetDropoutDescriptor(char*, Handle* handle, float, void* states) {
  if (states) launch_work(handle, "cudnn::ops::initDropoutStates_vgpu", 0, 1, kDropoutStates);
  return success;
}
VGPU_API int cudnnRestoreDropoutDescriptor(char*) { return success; }

// ---- recurrent layers
// ----------------------------------------------------------------------------------

VGPU_API int cudnnCreateRNNDescriptor(Recurrent** out) {
  *out = new Recurrent{};
  return success;
}
VGPU_API int cudnnDestroyRNNDescriptor(Recurrent* rnn) {
  delete rnn;
  return success;
}
VGPU_API int cudnnSetRNNDescriptor_v8(Recurrent* rnn, int algorithm, int mode, int, int direction, int,
                                      int type, int, int math, int input, int hidden, int projection,
                                      int layers) {
  *rnn = {algorithm, mode, direction ? 2 : 1, type, math, input, hidden, projection, layers};
  return success;
}

VGPU_API int cudnnCreateRNNDataDescriptor(Sequences** out) {
  *out = new Sequences;
  return success;
}
VGPU_API int cudnnDestroyRNNDataDescriptor(Sequences* sequences) {
  delete sequences;
  return success;
}
VGPU_API int cudnnSetRNNDataDescriptor(Sequences* sequences, int type, int, int longest, int batch,
                                       int width, const int* lengths) {
  *sequences = {type, longest, batch, width, 0};
  for (int i = 0; i < batch; ++i)
    sequences->steps += lengths[i];
  return success;
}

VGPU_API int cudnnGetRNNWeightSpaceSize(Handle*, const Recurrent* rnn, std::size_t* bytes) {
  *bytes = static_cast<std::size_t>(weights(*rnn) * element_bytes(rnn->type));
  return success;
}

// The space has the matrices of all layers, then all biases: of a layer first those for the input.
VGPU_API int cudnnGetRNNWeightParams(Handle*, const Recurrent* rnn, int place, std::size_t, char* space,
                                     int number, Tensor* matrix, char** matrix_at, Tensor* bias,
                                     char** bias_at) {
  double offset = 0, hidden = rnn->hidden;
  for (int before = 0; before < place; ++before)
    offset += rnn->matrices(before / rnn->directions);
  int gates = rnn->gates(), input = rnn->input_of(place / rnn->directions);
  int columns = number < gates ? input : number < 2 * gates ? rnn->output() : rnn->hidden;
  int rows = number < 2 * gates ? rnn->hidden : rnn->output();
  offset += hidden * (std::min(number, gates) * input +
                      std::clamp(number - gates, 0, gates) * static_cast<double>(rnn->output()));
  auto at = [&](double elements) {
    return space + static_cast<std::size_t>(elements * element_bytes(rnn->type));
  };
  if (matrix) *matrix = {rnn->type, {1, rows, columns}, {1LL * rows * columns, columns, 1}};
  if (matrix_at) *matrix_at = at(offset);
  double biases = weights(*rnn) - 2 * hidden * gates * rnn->layers * rnn->directions;
  if (bias) *bias = {rnn->type, {1, rows, 1}, {rows, 1, 1}};
  if (bias_at) *bias_at = at(biases + hidden * (2.0 * gates * place + number));
  return success;
}

VGPU_API int cudnnGetRNNTempSpaceSizes(Handle*, const Recurrent* rnn, int mode, const Sequences* x,
                                       std::size_t* workspace, std::size_t* reserve) {
  double element = element_bytes(rnn->type) * x->longest * x->batch * rnn->directions;
  if (workspace) *workspace = static_cast<std::size_t>(element * rnn->gates() * rnn->hidden);
  double kept = element * kept_elements(*rnn) * rnn->layers;
  if (reserve) *reserve = mode ? static_cast<std::size_t>(kept) : 0;  // 1: training
  return success;
}

VGPU_API int cudnnRNNForward(Handle* handle, const Recurrent* rnn, int, const void*,
                             const Sequences* x) {
  return run(handle, rnn, x);
}
VGPU_API int cudnnRNNBackwardData_v8(Handle* handle, const Recurrent* rnn, const void*,
                                     const Sequences* y) {
  return run(handle, rnn, y);
}
VGPU_API int cudnnRNNBackwardWeights_v8(Handle* handle, const Recurrent* rnn, int, const void*,
                                        const Sequences* x) {
  double matrices = 0;
  for (int layer = 0; layer < rnn->layers; ++layer)
    matrices += rnn->directions * rnn->matrices(layer);
  launch_work(handle, "sm90_xmma_gemm_rnn_weights_vgpu", 2 * matrices * x->steps, speed_of(*rnn),
              matrices * element_bytes(rnn->type));
  return success;
}

// ---- CTC losses
// ----------------------------------------------------------------------------------------

namespace {

constexpr int kLongestLabel = 256;  // of what torch gives to cuDNN

// For each step of a sequence and each state of its labels (blanks in between), two numbers.
int ctc_space(const Tensor* probabilities, std::size_t* bytes) {
  double letters = static_cast<double>(std::max<std::int64_t>(probabilities->sizes[2], 1));
  double states = 2.0 * kLongestLabel + 1;
  *bytes = static_cast<std::size_t>(probabilities->elements() / letters * states * 2 * 4);
  return success;
}

int ctc_loss(const Handle* handle, const Tensor* probabilities, const Tensor* gradients) {
  launch_work(handle, "cudnn::ctc_loss_vgpu", 0, 1,
              2 * probabilities->bytes() + (gradients ? gradients->bytes() : 0));
  return success;
}

}  // namespace

VGPU_API int cudnnCreateCTCLossDescriptor(char** out) {
  *out = new char;
  return success;
}
VGPU_API int cudnnDestroyCTCLossDescriptor(char* loss) {
  delete loss;
  return success;
}
VGPU_API int cudnnSetCTCLossDescriptorEx(char*) { return success; }
VGPU_API int cudnnSetCTCLossDescriptor_v8(char*) { return success; }
VGPU_API int cudnnSetCTCLossDescriptor_v9(char*) { return success; }
VGPU_API int cudnnGetCTCLossWorkspaceSize(Handle*, const Tensor* probabilities, const Tensor*,
                                          const int*, const int*, const int*, int, void*,
                                          std::size_t* bytes) {
  return ctc_space(probabilities, bytes);
}
VGPU_API int cudnnGetCTCLossWorkspaceSize_v8(Handle*, int, void*, const Tensor* probabilities,
                                             const Tensor*, std::size_t* bytes) {
  return ctc_space(probabilities, bytes);
}
VGPU_API int cudnnCTCLoss(Handle* handle, const Tensor* probabilities, const void*, const int*,
                          const int*, const int*, void*, const Tensor* gradients) {
  return ctc_loss(handle, probabilities, gradients);
}
VGPU_API int cudnnCTCLoss_v8(Handle* handle, int, void*, const Tensor* probabilities, const void*,
                             const int*, const int*, const int*, void*, const Tensor* gradients) {
  return ctc_loss(handle, probabilities, gradients);
}
