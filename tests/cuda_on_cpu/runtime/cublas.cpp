// cuBLAS: GEMM as a plain loop in registers' worth of blocks, with the habits of the real library
// that trip programs up: it runs in the stream, reads alpha and beta when called, scribbles over
// the workspace it was given, and forgets that workspace when the stream is set.
#include "../float16.h"
#include "../include/cublas_v2.h"
#include "internal.h"

struct cublasContext {
    int device;
    cudaStream_t stream;
    void *workspace;
    size_t workspace_bytes;
    cublasMath_t math_mode;
    cublasPointerMode_t pointer_mode;
};

namespace cuda_on_cpu {

namespace {

Registry<cublasContext> handles;

// A block of C that is summed in registers: ROWS along its columns, which are contiguous.
enum { ROWS = 16, COLUMNS = 4 };
typedef float Rows __attribute__((vector_size(ROWS * sizeof(float))));

struct Gemm {
    cublasOperation_t op_a, op_b;
    int m, n, k;
    const void *alpha, *beta; // device pointers if by_pointer
    float alpha_value, beta_value;
    bool by_pointer;
    const void *a, *b;
    void *c;
    cudaDataType ab_type, c_type;
    int lda, ldb, ldc;
    void *workspace;
    size_t workspace_bytes;
};

} // namespace

static size_t size_of(cudaDataType type) {
    return type == CUDA_R_32F ? 4 : 2;
}

static float read_element(const void *memory, cudaDataType type, size_t i) {
    if (type == CUDA_R_32F) return static_cast<const float *>(memory)[i];
    const uint16_t bits = static_cast<const uint16_t *>(memory)[i];
    return type == CUDA_R_16F ? half_to_float(bits) : bfloat_to_float(bits);
}

static void write_element(void *memory, cudaDataType type, size_t i, float value) {
    if (type == CUDA_R_32F) static_cast<float *>(memory)[i] = value;
    else if (type == CUDA_R_16F) static_cast<uint16_t *>(memory)[i] = float_to_half(value);
    else static_cast<uint16_t *>(memory)[i] = float_to_bfloat(value);
}

// op(X) as floats, `rows` x `columns`; element (row, column) of the result at
// row * row_step + column * column_step.
static void widen(const void *x, cudaDataType type, cublasOperation_t op, int ld, int rows,
                  int columns, size_t row_step, size_t column_step, float *to) {
    const size_t x_row = op == CUBLAS_OP_N ? 1 : static_cast<size_t>(ld);
    const size_t x_column = op == CUBLAS_OP_N ? static_cast<size_t>(ld) : 1;
    for (size_t column = 0; column < static_cast<size_t>(columns); column++)
        for (size_t row = 0; row < static_cast<size_t>(rows); row++)
            to[row * row_step + column * column_step] =
                read_element(x, type, row * x_row + column * x_column);
}

// sums[column] = the ROWS rows of op(A) at `a`, times COLUMNS columns of op(B) at `b`.
static void multiply_block(const float *a, size_t a_step, const float *b, size_t b_step, int k,
                           Rows sums[COLUMNS]) {
    for (int j = 0; j < COLUMNS; j++) sums[j] = Rows{};
    for (int p = 0; p < k; p++) {
        Rows rows;
        memcpy(&rows, a + static_cast<size_t>(p) * a_step, sizeof rows);
        for (size_t j = 0; j < COLUMNS; j++)
            sums[j] += rows * b[j * b_step + static_cast<size_t>(p)];
    }
}

static void write_block(const Gemm &g, int row, int column, const Rows sums[COLUMNS]) {
    for (int j = 0; j < COLUMNS && column + j < g.n; j++) {
        for (int i = 0; i < ROWS && row + i < g.m; i++) {
            const size_t at = static_cast<size_t>(column + j) * static_cast<size_t>(g.ldc) +
                              static_cast<size_t>(row + i);
            float value = g.alpha_value * sums[j][i];
            // C may hold NaN when beta is 0: it is not read then.
            if (g.beta_value != 0) value += g.beta_value * read_element(g.c, g.c_type, at);
            write_element(g.c, g.c_type, at, value);
        }
    }
}

// The last COLUMNS of B and ROWS of A are padded with zeros.
static void multiply(const Gemm &g) {
    const size_t rows = (static_cast<size_t>(g.m) + ROWS - 1) / ROWS * ROWS;
    const size_t columns = (static_cast<size_t>(g.n) + COLUMNS - 1) / COLUMNS * COLUMNS;
    const size_t depth = static_cast<size_t>(g.k);
    std::vector<float> a(rows * depth), b(columns * depth);
    widen(g.a, g.ab_type, g.op_a, g.lda, g.m, g.k, 1, rows, a.data());
    widen(g.b, g.ab_type, g.op_b, g.ldb, g.k, g.n, 1, depth, b.data());
    Rows sums[COLUMNS];
    for (int column = 0; column < g.n; column += COLUMNS) {
        const float *b_columns = b.data() + static_cast<size_t>(column) * depth;
        for (int row = 0; row < g.m; row += ROWS) {
            multiply_block(a.data() + row, rows, b_columns, depth, g.k, sums);
            write_block(g, row, column, sums);
        }
    }
}

static bool all_on_device(const Gemm &g) {
    return cuda_on_cpu_is_device(g.a) && cuda_on_cpu_is_device(g.b) && cuda_on_cpu_is_device(g.c);
}

static void run_gemm(Gemm g) {
    const size_t scribbled = g.workspace_bytes < (64u << 10) ? g.workspace_bytes : 64u << 10;
    if (g.workspace) memset(g.workspace, 0xff, scribbled);
    if (g.by_pointer) {
        g.alpha_value = *static_cast<const float *>(g.alpha);
        g.beta_value = *static_cast<const float *>(g.beta);
    }
    if (all_on_device(g)) multiply(g);
    else set_device_fault(cudaErrorIllegalAddress);
}

// ---- checks -------------------------------------------------------------------------------------

static bool known_type(cudaDataType type) {
    return type == CUDA_R_16F || type == CUDA_R_16BF || type == CUDA_R_32F;
}

static bool known_op(cublasOperation_t op) {
    return op == CUBLAS_OP_N || op == CUBLAS_OP_T || op == CUBLAS_OP_C;
}

static cublasStatus_t check_gemm(const Gemm &g, cudaDataType b_type, cublasComputeType_t compute) {
    const int a_rows = g.op_a == CUBLAS_OP_N ? g.m : g.k;
    const int b_rows = g.op_b == CUBLAS_OP_N ? g.k : g.n;
    if (!known_op(g.op_a) || !known_op(g.op_b)) return CUBLAS_STATUS_INVALID_VALUE;
    if (g.m < 0 || g.n < 0 || g.k < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (g.lda < std::max(1, a_rows) || g.ldb < std::max(1, b_rows) || g.ldc < std::max(1, g.m))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!g.alpha || !g.beta) return CUBLAS_STATUS_INVALID_VALUE;
    if (!known_type(g.ab_type) || g.ab_type != b_type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (g.c_type != g.ab_type && g.c_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_PEDANTIC)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (g.ab_type == CUDA_R_16BF && settings().arch < 80) return CUBLAS_STATUS_ARCH_MISMATCH;
    if (!aligned(g.a, size_of(g.ab_type)) || !aligned(g.b, size_of(g.ab_type)) ||
        !aligned(g.c, size_of(g.c_type)))
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

// One call of cuBLAS: the lock, and a failure that a test ordered.
class BlasCall {
  public:
    explicit BlasCall(const char *name, int kind = Call::plain)
        : call(nullptr, kind), status(static_cast<cublasStatus_t>(ordered_failure(name))) {
        if (!status && call.refused())
            status = device_fault() ? CUBLAS_STATUS_EXECUTION_FAILED
                                    : CUBLAS_STATUS_NOT_INITIALIZED;
    }
    BlasCall(const char *name, cublasHandle_t handle, int kind = Call::plain)
        : BlasCall(name, kind) {
        if (!status && !handles.has(handle)) status = CUBLAS_STATUS_NOT_INITIALIZED;
    }
    cublasStatus_t refusal() const {
        return status;
    }

  private:
    Call call;
    cublasStatus_t status;
};

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// ---- the API ------------------------------------------------------------------------------------

extern "C" cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    BlasCall call("cublasCreate");
    if (call.refusal()) return call.refusal();
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = new cublasContext();
    (*handle)->device = current_device();
    handles.add(*handle);
    counters().values.cublas_handles++;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    BlasCall call("cublasDestroy", handle, Call::gives_back);
    if (call.refusal()) return call.refusal();
    handles.remove(handle);
    delete handle;
    counters().values.cublas_handles--;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int *version) {
    if (!version) return CUBLAS_STATUS_INVALID_VALUE;
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    BlasCall call("cublasSetStream", handle);
    if (call.refusal()) return call.refusal();
    handle->stream = stream;
    handle->workspace = nullptr;
    handle->workspace_bytes = 0;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream) {
    BlasCall call("cublasGetStream", handle);
    if (call.refusal()) return call.refusal();
    *stream = handle->stream;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace,
                                                size_t bytes) {
    BlasCall call("cublasSetWorkspace", handle);
    if (call.refusal()) return call.refusal();
    if (workspace && (!aligned(workspace, 256) || !cuda_on_cpu_is_device(workspace)))
        return CUBLAS_STATUS_INVALID_VALUE;
    handle->workspace = workspace;
    handle->workspace_bytes = workspace ? bytes : 0;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    BlasCall call("cublasSetMathMode", handle);
    if (call.refusal()) return call.refusal();
    handle->math_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    BlasCall call("cublasGetMathMode", handle);
    if (call.refusal()) return call.refusal();
    *mode = handle->math_mode;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
    BlasCall call("cublasSetPointerMode", handle);
    if (call.refusal()) return call.refusal();
    handle->pointer_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle,
                                                  cublasPointerMode_t *mode) {
    BlasCall call("cublasGetPointerMode", handle);
    if (call.refusal()) return call.refusal();
    *mode = handle->pointer_mode;
    return CUBLAS_STATUS_SUCCESS;
}

// The sums here are always in one order.
extern "C" cublasStatus_t cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t) {
    BlasCall call("cublasSetAtomicsMode", handle);
    return call.refusal();
}

extern "C" cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                                       cublasOperation_t transb, int m, int n, int k,
                                       const void *alpha, const void *A, cudaDataType Atype,
                                       int lda, const void *B, cudaDataType Btype, int ldb,
                                       const void *beta, void *C, cudaDataType Ctype, int ldc,
                                       cublasComputeType_t computeType, cublasGemmAlgo_t) {
    BlasCall call("cublasGemmEx", handle);
    if (call.refusal()) return call.refusal();
    Gemm g = {};
    g.op_a = transa;
    g.op_b = transb;
    g.m = m;
    g.n = n;
    g.k = k;
    g.alpha = alpha;
    g.beta = beta;
    g.by_pointer = handle->pointer_mode == CUBLAS_POINTER_MODE_DEVICE;
    g.a = A;
    g.b = B;
    g.c = C;
    g.ab_type = Atype;
    g.c_type = Ctype;
    g.lda = lda;
    g.ldb = ldb;
    g.ldc = ldc;
    g.workspace = handle->workspace;
    g.workspace_bytes = handle->workspace_bytes;
    const cublasStatus_t status = check_gemm(g, Btype, computeType);
    if (status) return status;
    if (!g.by_pointer) {
        g.alpha_value = *static_cast<const float *>(alpha);
        g.beta_value = *static_cast<const float *>(beta);
    }
    if (m == 0 || n == 0) return CUBLAS_STATUS_SUCCESS;
    const cudaError_t error = submit(handle->stream, [g] { run_gemm(g); });
    return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

// ---- texts --------------------------------------------------------------------------------------

namespace {

struct StatusText {
    cublasStatus_t status;
    const char *name, *text;
};

#define STATUS_TEXT(status, text) \
    { status, #status, text }

const StatusText status_texts[] = {
    STATUS_TEXT(CUBLAS_STATUS_SUCCESS, "success"),
    STATUS_TEXT(CUBLAS_STATUS_NOT_INITIALIZED, "the library was not initialized"),
    STATUS_TEXT(CUBLAS_STATUS_ALLOC_FAILED, "the resource allocation failed"),
    STATUS_TEXT(CUBLAS_STATUS_INVALID_VALUE, "an invalid value was used"),
    STATUS_TEXT(CUBLAS_STATUS_ARCH_MISMATCH, "an absent device architectural feature is required"),
    STATUS_TEXT(CUBLAS_STATUS_MAPPING_ERROR, "an access to GPU memory space failed"),
    STATUS_TEXT(CUBLAS_STATUS_EXECUTION_FAILED, "the function failed to launch on the GPU"),
    STATUS_TEXT(CUBLAS_STATUS_INTERNAL_ERROR, "an internal operation failed"),
    STATUS_TEXT(CUBLAS_STATUS_NOT_SUPPORTED, "the functionality is not supported"),
    STATUS_TEXT(CUBLAS_STATUS_LICENSE_ERROR, "the license check failed"),
};

#undef STATUS_TEXT

const StatusText *find_status(cublasStatus_t status) {
    for (const StatusText &text : status_texts)
        if (text.status == status) return &text;
    return nullptr;
}

} // namespace

extern "C" const char *cublasGetStatusName(cublasStatus_t status) {
    const StatusText *text = find_status(status);
    return text ? text->name : "CUBLAS_STATUS_UNKNOWN";
}

extern "C" const char *cublasGetStatusString(cublasStatus_t status) {
    const StatusText *text = find_status(status);
    return text ? text->text : "unknown error";
}
