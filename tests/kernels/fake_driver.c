// As much of the CUDA driver, and of torch's stream, as launches ask for. A "function" is one of those below; it is
// called at once, with the parameters of the launch. What the driver was asked for can be read in `asked`.
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static char text[1 << 16];
static size_t length_of_text = 0;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static int result_of_launch = 0;
static _Thread_local CUcontext context = 0;

const char* asked(void) { return text; }
void forget(void) { text[length_of_text = 0] = 0; }
void fail_with(int result) { result_of_launch = result; }

static void note(const char* line) {  // until there is no room
  const size_t length = strlen(line);
  pthread_mutex_lock(&writing);
  if (length_of_text + length < sizeof text) {
    memcpy(text + length_of_text, line, length + 1);
    length_of_text += length;
  }
  pthread_mutex_unlock(&writing);
}

CUresult cuGetErrorString(CUresult result, const char** string) {
  *string = result == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "another error";
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* current) { *current = context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext wanted) { context = wanted; note("context set\n"); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* primary, CUdevice device) {
  *primary = (CUcontext)(uintptr_t)(0x100 + device);
  return CUDA_SUCCESS;
}

int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = (void*)(uintptr_t)(0x200 + device);
  return 0;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t axes, void* address,
                                const cuuint64_t* shape, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  char line[512];
  int length = snprintf(line, sizeof line, "map %llu type %d swizzle %d rest %d %d %d:", (unsigned long long)(uintptr_t)address,
                        type, swizzle, interleave, promotion, fill);
  for (unsigned axis = 0; axis < axes; ++axis)
    length += snprintf(line + length, sizeof line - length, " %llu/%u/%u/%llu", (unsigned long long)shape[axis], box[axis],
                       steps[axis], axis + 1 < axes ? (unsigned long long)strides[axis] : 0ull);
  snprintf(line + length, sizeof line - length, "\n");
  note(line);
  memcpy(map, &address, sizeof address);
  return CUDA_SUCCESS;
}

typedef void (*Function)(unsigned grid, void** parameters);

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  char line[256];
  if (result_of_launch) return (CUresult)result_of_launch;
  snprintf(line, sizeof line, "launch %u×%u×%u of %u×%u×%u, %u bytes, stream %llx, overlaps %d\n", config->gridDimX,
           config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
           config->sharedMemBytes, (unsigned long long)(uintptr_t)config->hStream,
           config->numAttrs == 1 && config->attrs[0].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
               config->attrs[0].value.programmaticStreamSerializationAllowed);
  note(line);
  ((Function)function)(config->gridDimX, parameters);
  return extra ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static float* at(void** parameters, int index) { return *(float**)parameters[index]; }

// out = q + 2 k + 3 v, logsumexp = scale; of (q's window, k, v, out, logsumexp, int32 numbers, float scale)
void forward_function(unsigned grid, void** p) {
  const int32_t numbers = *(int32_t*)p[5];
  for (int32_t i = 0; i < numbers; ++i) at(p, 3)[i] = at(p, 0)[i] + 2 * at(p, 1)[i] + 3 * at(p, 2)[i];
  for (unsigned i = 0; i < grid; ++i) at(p, 4)[i] = *(float*)p[6];
}

// buffer = gradient, behind an offset of four numbers
void prepare_function(unsigned grid, void** p) {
  for (unsigned i = 0; i < grid; ++i) at(p, 1)[i] = at(p, 0)[i];
}

// dq, dk, dv = 1, 2, 3 times the buffer's numbers
void finish_function(unsigned grid, void** p) {
  for (unsigned i = 0; i < grid; ++i)
    for (int which = 0; which < 3; ++which) at(p, 1 + which)[i] = (float)(1 + which) * at(p, 0)[i];
}
