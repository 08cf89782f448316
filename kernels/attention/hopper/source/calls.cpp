// Calls of the kernels for compute capability 9.0: their autograd function, which needs no Python, and the
// implementation of torch's operations, which compiled functions call. That asks Python only whether launch hooks are
// set.
//
// Python prepares the first call of each kind (`learn_forward`, `learn_backward`): it compiles the kernels, and says
// what Triton's launcher passes to them. Later calls of that kind allocate their results and launch from here, in the
// backward pass on autograd's own thread, which then need not wait for Python's lock. All that is kept is what Python
// said, a bounded number of kinds; the copy engine's descriptors are encoded in each call.

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <cuda.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace py = pybind11;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

constexpr uint64_t ALIGNMENT = 16;  // the kernels are compiled for addresses that are multiples of it
constexpr size_t MOST_WINDOWS = 9, MOST_PARAMETERS = 128, MOST_AXES = 5;
constexpr size_t MOST_KINDS = 1024;  // of calls; beyond that all are forgotten, and learned anew

// ---- The CUDA driver, and torch's stream --------------------------------------------------------------------------

struct Driver {
  decltype(&::cuLaunchKernelEx) launch = nullptr;
  decltype(&::cuTensorMapEncodeTiled) encode = nullptr;
  decltype(&::cuGetErrorString) error_string = nullptr;
  decltype(&::cuCtxGetCurrent) current_context = nullptr;
  decltype(&::cuCtxSetCurrent) set_context = nullptr;
  decltype(&::cuDevicePrimaryCtxRetain) primary_context = nullptr;
  int32_t (*current_stream)(int32_t device, void** stream) = nullptr;  // of torch's C interface

  void check(CUresult result, const char* what) const {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    error_string(result, &text);
    TORCH_CHECK(false, "attention: ", what, " failed: ", text ? text : "unknown error of the CUDA driver");
  }
} driver;

void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  TORCH_CHECK(found != nullptr, "there is no ", name, " in the CUDA driver or in torch");
  return found;
}

void* library(const std::string& path) {
  void* opened = dlopen(path.c_str(), RTLD_LAZY);
  TORCH_CHECK(opened != nullptr, dlerror());
  return opened;
}

void open(const std::string& cuda, const std::string& torch) {
  void* const from_cuda = library(cuda);
  void* const from_torch = library(torch);
  Driver found;
  found.launch = reinterpret_cast<decltype(found.launch)>(symbol(from_cuda, "cuLaunchKernelEx"));
  found.encode = reinterpret_cast<decltype(found.encode)>(symbol(from_cuda, "cuTensorMapEncodeTiled"));
  found.error_string = reinterpret_cast<decltype(found.error_string)>(symbol(from_cuda, "cuGetErrorString"));
  found.current_context = reinterpret_cast<decltype(found.current_context)>(symbol(from_cuda, "cuCtxGetCurrent"));
  found.set_context = reinterpret_cast<decltype(found.set_context)>(symbol(from_cuda, "cuCtxSetCurrent"));
  found.primary_context =
      reinterpret_cast<decltype(found.primary_context)>(symbol(from_cuda, "cuDevicePrimaryCtxRetain"));
  found.current_stream =
      reinterpret_cast<decltype(found.current_stream)>(symbol(from_torch, "aoti_torch_get_current_cuda_stream"));
  driver = found;
}

// A thread that found its memory in torch's cache may not have called CUDA yet, and then has no context.
void make_context_current(int32_t device) {
  CUcontext context = nullptr;
  driver.check(driver.current_context(&context), "asking for the context");
  if (context != nullptr) return;
  driver.check(driver.primary_context(&context, device), "taking the context");
  driver.check(driver.set_context(context), "setting the context");
}

CUstream stream_of(int32_t device) {
  void* stream = nullptr;
  TORCH_CHECK(driver.current_stream(device, &stream) == 0, "attention: torch does not tell its stream");
  return static_cast<CUstream>(stream);
}

// ---- A kernel, and what is passed to it ---------------------------------------------------------------------------

// A descriptor, through which the copy engine moves blocks of a tensor. As the driver wants it: innermost axis first.
struct Window {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  cuuint32_t axes;
  std::array<cuuint64_t, MOST_AXES> shape, strides;  // strides in bytes, without the innermost
  std::array<cuuint32_t, MOST_AXES> box;
};

struct Parameter {
  enum class Kind { value, address, window } kind;
  uint64_t bits;      // the value itself, or bytes from the begin of a tensor
  size_t place = 0;   // of the tensor, among those of a call
  size_t window = 0;  // among those of the kernel
};

struct Kernel {
  CUfunction function;
  unsigned grid, threads, shared_bytes;
  bool overlaps;  // sets itself up while the kernel before it ends
  std::vector<Parameter> parameters;
  std::vector<Window> windows;

  explicit Kernel(const py::dict& described)
      : function(reinterpret_cast<CUfunction>(described["function"].cast<uintptr_t>())),
        grid(described["grid"].cast<unsigned>()),
        threads(described["threads"].cast<unsigned>()),
        shared_bytes(described["shared_bytes"].cast<unsigned>()),
        overlaps(described["overlaps"].cast<bool>()) {
    for (const auto& one : described["parameters"].cast<std::vector<py::tuple>>()) add(one);
    TORCH_CHECK(parameters.size() <= MOST_PARAMETERS && windows.size() <= MOST_WINDOWS, "too many parameters");
  }

  // ("value", bits), ("address", place, bytes) or ("window", place, bytes, type, swizzle, shape, strides, box)
  void add(const py::tuple& one) {
    const auto kind = one[0].cast<std::string>();
    if (kind == "value") {
      parameters.push_back({Parameter::Kind::value, one[1].cast<uint64_t>()});
      return;
    }
    Parameter parameter{Parameter::Kind::address, one[2].cast<uint64_t>(), one[1].cast<size_t>()};
    if (kind == "window") {
      parameter.kind = Parameter::Kind::window;
      parameter.window = windows.size();
      const auto shape = one[5].cast<std::vector<uint64_t>>(), strides = one[6].cast<std::vector<uint64_t>>();
      const auto box = one[7].cast<std::vector<uint32_t>>();
      TORCH_CHECK(shape.size() <= MOST_AXES && strides.size() == shape.size() && box.size() == shape.size());
      Window window{static_cast<CUtensorMapDataType>(one[3].cast<int>()),
                    static_cast<CUtensorMapSwizzle>(one[4].cast<int>()), static_cast<cuuint32_t>(shape.size())};
      for (size_t axis = 0; axis < shape.size(); ++axis) {
        const size_t from = shape.size() - 1 - axis;
        window.shape[axis] = shape[from];
        window.box[axis] = box[from];
        if (from > 0) window.strides[axis] = strides[from - 1];
      }
      windows.push_back(window);
    }
    parameters.push_back(parameter);
  }

  // Launches on tensors at these addresses.
  void launch(const uint64_t* addresses, CUstream stream) const {
    static constexpr std::array<cuuint32_t, MOST_AXES> steps{1, 1, 1, 1, 1};
    std::array<CUtensorMap, MOST_WINDOWS> maps;
    std::array<uint64_t, MOST_PARAMETERS> own;
    std::array<const void*, MOST_PARAMETERS + 2> pointers;
    for (size_t index = 0; index < parameters.size(); ++index) {
      const Parameter& parameter = parameters[index];
      if (parameter.kind == Parameter::Kind::value) {
        pointers[index] = &parameter.bits;
        continue;
      }
      own[index] = addresses[parameter.place] + parameter.bits;
      pointers[index] = &own[index];
      if (parameter.kind == Parameter::Kind::window) {
        const Window& window = windows[parameter.window];
        CUtensorMap* const map = &maps[parameter.window];
        driver.check(driver.encode(map, window.type, window.axes, reinterpret_cast<void*>(own[index]),
                                   window.shape.data(), window.strides.data(), window.box.data(), steps.data(),
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, window.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                     "encoding a descriptor");
        pointers[index] = map;
      }
    }
    static constexpr CUdeviceptr no_scratch = 0;  // Triton's kernels end with two such parameters
    pointers[parameters.size()] = pointers[parameters.size() + 1] = &no_scratch;
    CUlaunchAttribute overlap{};
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = grid;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = threads;
    config.sharedMemBytes = shared_bytes;
    config.hStream = stream;
    config.attrs = &overlap;
    config.numAttrs = overlaps ? 1 : 0;
    driver.check(driver.launch(&config, function, const_cast<void**>(pointers.data()), nullptr), "a launch");
  }
};

// ---- Kinds of calls -----------------------------------------------------------------------------------------------

using Key = c10::SmallVector<int64_t, 64>;  // dtypes, devices, shapes and strides of the tensors, and flags

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (const int64_t one : key) hash = (hash ^ static_cast<uint64_t>(one)) * 0x100000001b3;
    return hash ^ hash >> 32;
  }
};

// Tensors whose memory does not simply hold their values: those of Python's dispatch, of functorch, and of
// functionalization; views that are to be negated, and zeros without memory.
const c10::DispatchKeySet FOREIGN{c10::DispatchKey::Python,        c10::DispatchKey::FuncTorchBatched,
                                  c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchGradWrapper,
                                  c10::DispatchKey::Negative,      c10::DispatchKey::ZeroTensor};

// True if somebody must see operations: a mode in Python, functorch, or torch.jit's tracer.
bool somebody_listens() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uint64_t>(tensor.const_data_ptr()) % ALIGNMENT == 0; }

// False if the tensor can be no argument of a known call.
bool add(Key& key, const Tensor& tensor) {
  if (!tensor.defined() || tensor.key_set().has_any(FOREIGN)) return false;
  if (tensor.layout() != at::kStrided || tensor.dim() != 4 || !is_aligned(tensor)) return false;
  key.push_back(static_cast<int64_t>(tensor.scalar_type()));
  key.push_back(tensor.device().index());
  for (const int64_t size : tensor.sizes()) key.push_back(size);
  for (const int64_t stride : tensor.strides()) key.push_back(stride);
  return true;
}

std::optional<Key> key_of(std::initializer_list<std::reference_wrapper<const Tensor>> tensors, bool is_causal) {
  if (somebody_listens()) return std::nullopt;
  Key key;
  key.push_back(is_causal);
  for (const Tensor& tensor : tensors)
    if (!add(key, tensor)) return std::nullopt;
  return key;
}

template <typename Plan>
class Plans {
 public:
  std::shared_ptr<const Plan> find(const std::optional<Key>& key) {
    if (!key) return nullptr;
    const std::shared_lock lock(mutex_);
    const auto found = plans_.find(*key);
    return found == plans_.end() ? nullptr : found->second;
  }

  // Calls with a tensor that `add` refuses stay unknown.
  void keep(const std::optional<Key>& key, std::shared_ptr<const Plan> plan) {
    if (!key) return;
    const std::unique_lock lock(mutex_);
    if (plans_.size() >= MOST_KINDS) plans_.clear();
    plans_[*key] = std::move(plan);
  }

  void forget() {
    const std::unique_lock lock(mutex_);
    plans_.clear();
  }

  size_t size() {
    const std::shared_lock lock(mutex_);
    return plans_.size();
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Plan>, KeyHash> plans_;
};

struct Backward {
  int64_t numbers;  // elements of the float32 buffer
  bool is_deterministic;
  std::vector<Kernel> kernels;
};

Plans<Kernel> forwards;
Plans<Backward> backwards;

// What is asked of Python. Never freed, since autograd may outlive it.
py::object* differentiate = nullptr;  // what is not known here
py::object* hooks_are_set = nullptr;  // whether each launch must go through Triton, which tells somebody

// ---- Calls --------------------------------------------------------------------------------------------------------

template <size_t N>
std::array<uint64_t, N> addresses(const std::array<std::reference_wrapper<const Tensor>, N>& tensors) {
  std::array<uint64_t, N> found;
  for (size_t index = 0; index < N; ++index)
    found[index] = reinterpret_cast<uint64_t>(tensors[index].get().const_data_ptr());
  return found;
}

std::tuple<Tensor, Tensor> forward(const Kernel& kernel, const Tensor& q, const Tensor& k, const Tensor& v) {
  const c10::DeviceGuard guard(q.device());
  make_context_current(q.device().index());
  Tensor out = at::empty_like(q);
  Tensor logsumexp = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
  const auto places = addresses<5>({q, k, v, out, logsumexp});
  kernel.launch(places.data(), stream_of(q.device().index()));
  return {out, logsumexp};
}

std::optional<Key> backward_key(const Tensor& out_gradient, const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& out, const Tensor& logsumexp, bool is_causal) {
  const bool is_ours = !logsumexp.key_set().has_any(FOREIGN) && logsumexp.is_contiguous() && is_aligned(logsumexp);
  return is_ours ? key_of({out_gradient, q, k, v, out}, is_causal) : std::nullopt;
}

// The output's gradient as the copy engine takes it: that of a sum is one number, expanded.
Tensor with_rows(const Tensor& out_gradient) {
  if (out_gradient.key_set().has_any(FOREIGN) || out_gradient.layout() != at::kStrided) return out_gradient;
  const bool has_rows = out_gradient.dim() == 4 && out_gradient.stride(3) == 1;
  const auto strides = out_gradient.strides();
  return has_rows && std::find(strides.begin(), strides.end(), 0) == strides.end() ? out_gradient
                                                                                    : out_gradient.contiguous();
}

std::shared_ptr<const Backward> find_backward(const Tensor& out_gradient, const Tensor& q, const Tensor& k,
                                              const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                                              bool is_causal) {
  auto plan = backwards.find(backward_key(out_gradient, q, k, v, out, logsumexp, is_causal));
  const bool must_be_deterministic = at::globalContext().deterministicAlgorithms();
  return plan && must_be_deterministic && !plan->is_deterministic ? nullptr : plan;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of q, k and v

Gradients backward(const Backward& plan, const Tensor& out_gradient, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& logsumexp) {
  const c10::DeviceGuard guard(q.device());
  make_context_current(q.device().index());
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  const Tensor buffer = at::empty({plan.numbers}, q.options().dtype(at::kFloat));
  const auto places = addresses<10>({q, k, v, out_gradient, buffer, dk, dv, dq, out, logsumexp});
  const CUstream stream = stream_of(q.device().index());
  for (const Kernel& kernel : plan.kernels) kernel.launch(places.data(), stream);
  return {dq, dk, dv};
}

std::optional<Gradients> gradients(const Tensor& given, const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& out, const Tensor& logsumexp, bool is_causal) {
  const Tensor out_gradient = with_rows(given);
  const auto plan = find_backward(out_gradient, q, k, v, out, logsumexp, is_causal);
  if (!plan) return std::nullopt;
  return backward(*plan, out_gradient, q, k, v, out, logsumexp);
}

}  // namespace

namespace flopwatch {  // profilers show the name

struct Attention : torch::autograd::Function<Attention> {
  // Compiled autograd may call `backward` with its own tensors, which then go to Python's operation.
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal,
                        const std::shared_ptr<const Kernel>& kernel) {
    auto [out, logsumexp] = ::forward(*kernel, q, k, v);
    context->save_for_backward({q, k, v, out, logsumexp});
    context->saved_data["is_causal"] = is_causal;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list out_gradients) {
    const auto saved = context->get_saved_variables();
    const bool is_causal = context->saved_data["is_causal"].toBool();
    const std::array<bool, 3> needed{context->needs_input_grad(0), context->needs_input_grad(1),
                                     context->needs_input_grad(2)};
    // Python refuses to be differentiated in turn, and leaves out what is not needed.
    if (needed == std::array<bool, 3>{true, true, true} && !c10::GradMode::is_enabled()) {
      auto known = gradients(out_gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], is_causal);
      if (known) return {std::get<0>(*known), std::get<1>(*known), std::get<2>(*known), Tensor(), Tensor()};
    }
    const py::gil_scoped_acquire lock;
    const py::tuple given =
        (*differentiate)(out_gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], is_causal, needed);
    variable_list results(5);
    for (size_t index = 0; index < 3; ++index)
      if (!given[index].is_none()) results[index] = given[index].cast<Tensor>();
    return results;
  }
};

}  // namespace flopwatch

namespace {

bool needs_gradients(const Tensor& q, const Tensor& k, const Tensor& v) {
  return c10::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
}

std::optional<Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal) {
  const auto kernel = forwards.find(key_of({q, k, v}, is_causal));
  if (!kernel) return std::nullopt;
  // Profilers find the backward pass of a call by the number that its node in autograd's graph gets now.
  const int64_t number = needs_gradients(q, k, v) ? static_cast<int64_t>(at::sequence_number::peek()) : -1;
  RECORD_FUNCTION("flopwatch::flash_attention", std::vector<c10::IValue>({q, k, v}), number);
  return flopwatch::Attention::apply(q, k, v, is_causal, kernel);
}

void learn_forward(const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal, const py::dict& kernel) {
  forwards.keep(key_of({q, k, v}, is_causal), std::make_shared<const Kernel>(kernel));
}

void learn_backward(const Tensor& out_gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                    const Tensor& logsumexp, bool is_causal, int64_t numbers, bool is_deterministic,
                    const std::vector<py::dict>& kernels) {
  auto plan = std::make_shared<Backward>(Backward{numbers, is_deterministic, {}});
  for (const py::dict& kernel : kernels) plan->kernels.emplace_back(kernel);
  backwards.keep(backward_key(out_gradient, q, k, v, out, logsumexp, is_causal), plan);
}

// ---- torch's operations -------------------------------------------------------------------------------------------

using torch::jit::Stack;

bool somebody_hears_of_launches() {
  const py::gil_scoped_acquire lock;
  return (*hooks_are_set)().cast<bool>();
}

// Does a call, whose results then take the place of its arguments, or returns false and leaves them.
using Attempt = bool(const c10::OperatorHandle&, c10::DispatchKeySet, Stack&);

// q, k, v, is_causal, tf32, only_hopper, and the options: scale, window, softcap, document_ends, bottom_right
constexpr size_t FORWARD_ARGUMENTS = 11;

// Only calls without options are ever learned.
bool has_options(at::ArrayRef<c10::IValue> options) {
  return std::any_of(options.begin(), options.end(), [](const c10::IValue& option) {
    return !option.isNone() && !(option.isBool() && !option.toBool());
  });
}

bool attempt_forward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack& stack) {
  const auto given = torch::jit::last(stack, FORWARD_ARGUMENTS);
  if (has_options(given.slice(6))) return false;
  const Tensor &q = given[0].toTensor(), &k = given[1].toTensor(), &v = given[2].toTensor();
  const auto kernel = forwards.find(key_of({q, k, v}, given[3].toBool()));
  if (!kernel || somebody_hears_of_launches()) return false;
  auto [out, logsumexp] = forward(*kernel, q, k, v);
  torch::jit::drop(stack, FORWARD_ARGUMENTS);
  torch::jit::push(stack, std::move(out), std::move(logsumexp));
  return true;
}

// True for a tensor that needs a gradient, or has a tangent of forward mode.
bool is_differentiated(const c10::IValue& given) {
  if (!given.isTensor() || !given.toTensor().defined()) return false;
  const Tensor& tensor = given.toTensor();
  return (c10::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(0).defined();
}

// Passes a call that is not differentiated on to the keys below autograd's.
bool pass_autograd(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, Stack& stack) {
  const auto given = torch::jit::last(stack, operation.schema().arguments().size());
  if (std::any_of(given.begin(), given.end(), is_differentiated)) return false;
  const at::AutoDispatchBelowAutograd guard;
  operation.redispatchBoxed(keys & c10::after_autograd_keyset, &stack);
  return true;
}

bool attempt_backward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack& stack) {
  // the gradients of the output and of its log-sum-exp, q, k, v, the output, its log-sum-exp, is_causal, tf32, options
  constexpr size_t ARGUMENTS = 14;
  const auto given = torch::jit::last(stack, ARGUMENTS);
  if (!given[1].isNone() || has_options(given.slice(9))) return false;
  const Tensor out_gradient = with_rows(given[0].toTensor());
  const Tensor &q = given[2].toTensor(), &k = given[3].toTensor(), &v = given[4].toTensor();
  const Tensor &out = given[5].toTensor(), &logsumexp = given[6].toTensor();
  const auto plan = find_backward(out_gradient, q, k, v, out, logsumexp, given[7].toBool());
  if (!plan || somebody_hears_of_launches()) return false;
  auto [dq, dk, dv] = backward(*plan, out_gradient, q, k, v, out, logsumexp);
  torch::jit::drop(stack, ARGUMENTS);
  torch::jit::push(stack, std::move(dq), std::move(dk), std::move(dv));
  return true;
}

// An implementation that leaves what it does not do to the one before it, Python's. That one lives as long as the
// operations' definitions in Python, which is as long as the process.
class Implementation final : public c10::OperatorKernel {
 public:
  Implementation(Attempt* attempt, c10::SafeKernelFunction python) : attempt_(attempt), python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, Stack* stack) {
    if (!attempt_(operation, keys, *stack)) python_.callBoxed(operation, keys, stack);
  }

 private:
  Attempt* const attempt_;
  const c10::SafeKernelFunction python_;
};

// Implements the operations for tensors on such a device, once. Python's function at autograd's key costs more than the
// call, so it is asked only for what needs gradients.
void implement(const std::string& device) {
  static auto* const library = new torch::Library(torch::Library::IMPL, "flopwatch", std::nullopt, __FILE__, __LINE__);
  static std::unordered_set<std::string> implemented;
  if (!implemented.insert(device).second) return;
  const auto put = [](const std::string& name, const std::string& key_name, Attempt* attempt) {
    const auto key = c10::parseDispatchKey(key_name);
    const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow(("flopwatch::" + name).c_str(), "");
    auto own = std::make_unique<Implementation>(attempt, operation.getComputedKernelForDispatchKey(key));
    library->impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(std::move(own))));
  };
  put("flash_attention", device, attempt_forward);
  put("flash_attention", "Autograd" + device, pass_autograd);
  put("flash_attention_backward", device, attempt_backward);
  put("flash_attention_backward", "Autograd" + device, pass_autograd);
}

}  // namespace

PYBIND11_MODULE(flopwatch_hopper_calls, module) {
  using Free = py::call_guard<py::gil_scoped_release>;  // a launch waits while the driver's queue is full
  module.def("open", &open);
  module.def("ask", [](py::object for_gradients, py::object for_hooks) {
    differentiate = new py::object(std::move(for_gradients));
    hooks_are_set = new py::object(std::move(for_hooks));
  });
  module.def("implement", &implement);
  module.def("attend", &attend, Free());
  module.def("learn_forward", &learn_forward);
  module.def("learn_backward", &learn_backward);
  module.def("forget", [] {
    forwards.forget();
    backwards.forget();
  });
  module.def("known", [] { return std::make_tuple(forwards.size(), backwards.size()); });
}
