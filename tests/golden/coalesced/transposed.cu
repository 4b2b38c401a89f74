// coalesced: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt
// config   BM32-BN32
// template

// The problem.
constexpr int m = 100;  // rows of C
constexpr int n = 70;  // columns of C
constexpr int k = 33;  // length of a dot product
constexpr long long lda = 100, ldb = 33, ldc = 70;  // floats from one stored row to the next

// The choice.
constexpr int BM = 32, BN = 32;  // outputs of a block, one per thread

// What follows from it.
constexpr int num_threads = BM * BN;
constexpr int tiles_n = 3;  // blocks side by side along n

static_assert(num_threads <= 1024, "a block has at most 1024 threads");

extern "C" __global__ void __launch_bounds__(num_threads)
coalesced(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    // threadIdx.x runs through the 32 lanes of a warp first, and here it chooses the column: the lanes
    // write neighbouring floats of C, and share one float of A.
    const int row = blockIdx.x / tiles_n * BM + threadIdx.y;
    const int col = blockIdx.x % tiles_n * BN + threadIdx.x;

    if (row < m && col < n) {
        float sum = 0.0f;
        for (int p = 0; p < k; ++p)
            sum += A[p * lda + row] * B[col * ldb + p];

        const float old = beta != 0.0f ? C[row * ldc + col] : 0.0f;  // C is not read otherwise: it may hold NaN
        C[row * ldc + col] = alpha * sum + beta * old;
    }
}
