// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nn
// config   BM16-TM1-LM4-BN16-TN1-VM1-VN1-BK16-split_k1-cluster_k1-warps_k1-reg-stages1-transpose_a0-transpose_b1-read_k1-vec_a1-vec_b1-vec_c1-spread_n0-smem_pad0-exact-fragment_pipeline0-unroll_stages0-row-group_m1-min_blocks1
// template

// The problem.
constexpr int m = 256;  // rows of C
constexpr int n = 256;  // columns of C
constexpr int k = 256;  // length of a dot product
constexpr long long lda = 256, ldb = 256, ldc = 256;  // floats from one stored row to the next

// The choice.
constexpr int BM = 16, BN = 16;  // block tile of C
constexpr int BK = 16;  // depth of one step along k
constexpr int LM = 4, LN = 8;  // lanes of a warp
constexpr int TM = 1, TN = 1;  // outputs of one thread
constexpr int VM = 1, VN = 1;  // contiguous fragments of a thread's rows and columns
constexpr int stages = 1;  // shared-memory buffers
constexpr int vec_a = 1, vec_b = 1, vec_c = 1;  // floats per global access
constexpr int smem_pad = 0;  // floats added to shared rows that are written across
constexpr int group_m = 1;  // rows of tiles worked on together

// What follows from it.
constexpr int WM = LM * TM, WN = LN * TN;  // warp tile
constexpr int warps_n = BN / WN;
constexpr int num_threads = 32 * (BM / WM) * warps_n;
constexpr int tiles_m = 16, tiles_n = 16;  // block tiles of C
constexpr int tiles_k = 16;  // steps along k
constexpr int As_row = BK + smem_pad;  // floats from one shared row to the next
constexpr int Bs_row = BN;
constexpr int As_stage = BM * As_row;  // floats of one buffer
constexpr int Bs_stage = BK * Bs_row;

static_assert(LM * LN == 32, "a warp has 32 lanes");
static_assert(BM % WM == 0 && BN % WN == 0, "whole warp tiles fill the block tile");
static_assert(TM % VM == 0 && TN % VN == 0, "whole fragments fill the thread tile");
static_assert(m % BM == 0 && n % BN == 0, "tiles end at the edge of C");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert((BM * BK / vec_a) % num_threads == 0, "every thread copies the same share of A's tile");
static_assert((BN * BK / vec_b) % num_threads == 0, "every thread copies the same share of B's tile");
static_assert(lda % vec_a == 0 && ldb % vec_b == 0 && ldc % vec_c == 0, "vectors are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

extern "C" __global__ void __launch_bounds__(num_threads, 1)
sgemm(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    extern __shared__ __align__(16) float shared[];
    float* const As = shared;                      // [stages][BM][As_row]
    float* const Bs = shared + stages * As_stage;  // [stages][BK][Bs_row]

    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const int warp_m = warp / warps_n, warp_n = warp % warps_n;
    const int lane_m = lane / LN, lane_n = lane % LN;
    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = blockIdx.x / group_tiles, in_group = blockIdx.x % group_tiles;
    constexpr int group_rows = group_m;
    const int block_row = (group * group_m + in_group % group_rows) * BM;
    const int block_col = in_group / group_rows * BN;

    // A: the tile is BM stored rows of BK floats, moved vec_a at a time.
    constexpr int a_width = BK / vec_a;  // moves along one stored row
    constexpr int a_moves = BM * BK / vec_a / num_threads;  // moves of one thread
    constexpr int a_rows = num_threads / a_width;  // stored rows between a thread's moves
    const int a_row = thread / a_width, a_col = thread % a_width * vec_a;
    const float* a_global = A + (block_row + a_row) * lda + a_col;

    // B: the tile is BK stored rows of BN floats, moved vec_b at a time.
    constexpr int b_width = BN / vec_b;  // moves along one stored row
    constexpr int b_moves = BN * BK / vec_b / num_threads;  // moves of one thread
    constexpr int b_rows = num_threads / b_width;  // stored rows between a thread's moves
    const int b_row = thread / b_width, b_col = thread % b_width * vec_b;
    const float* b_global = B + b_row * ldb + (block_col + b_col);

    Vector<vec_a> a_staged[a_moves];
    Vector<vec_b> b_staged[b_moves];

    // Read the next tile of A and of B into registers.
    auto fetch_tile = [&]() {
        #pragma unroll
        for (int i = 0; i < a_moves; ++i) {
            const int row = i * a_rows, col = 0;
            const auto* from = reinterpret_cast<const Vector<vec_a>*>(a_global + row * lda + col);
            a_staged[i] = *from;
        }
        #pragma unroll
        for (int i = 0; i < b_moves; ++i) {
            const int row = i * b_rows, col = 0;
            const auto* from = reinterpret_cast<const Vector<vec_b>*>(b_global + row * ldb + col);
            b_staged[i] = *from;
        }
        a_global += BK;
        b_global += BK * ldb;
    };

    // Write the tile that was read last into buffer `stage`.
    auto store_tile = [&](int stage) {
        #pragma unroll
        for (int i = 0; i < a_moves; ++i) {
            const int row = i * a_rows, col = 0;
            *reinterpret_cast<Vector<vec_a>*>(&As[stage * As_stage + (a_row + row) * As_row + a_col + col]) = a_staged[i];
        }
        #pragma unroll
        for (int i = 0; i < b_moves; ++i) {
            const int row = i * b_rows, col = 0;
            *reinterpret_cast<Vector<vec_b>*>(&Bs[stage * Bs_stage + (b_row + row) * Bs_row + b_col + col]) = b_staged[i];
        }
    };

    // A thread's rows lie in fragments of VM, LM * VM apart, so that the lanes of a warp read without bank conflicts;
    // its columns likewise.
    const float* const a_fragments = As + (warp_m * WM + lane_m * VM) * As_row;
    const float* const b_fragments = Bs + warp_n * WN + lane_n * VN;
    alignas(16) float reg_m[1][TM], reg_n[1][TN];
    float acc[TM][TN] = {};

    // Read row kk of buffer `stage`: the operands of TM * TN FFMAs.
    auto load_fragments = [&](int half, int stage, int kk) {
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            reg_m[half][i] = a_fragments[stage * As_stage + (i / VM * (LM * VM) + i % VM) * As_row + kk];
        constexpr int read_n = VN < 4 ? VN : 4;
        #pragma unroll
        for (int j = 0; j < TN; j += read_n)
            *reinterpret_cast<Vector<read_n>*>(&reg_n[half][j]) = *reinterpret_cast<const Vector<read_n>*>(
                &b_fragments[stage * Bs_stage + kk * Bs_row + j / VN * (LN * VN) + j % VN]);
    };

    // acc += reg_m x reg_n, row by row.
    auto multiply = [&](int half) {
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            #pragma unroll
            for (int j = 0; j < TN; ++j)
                acc[i][j] += reg_m[half][i] * reg_n[half][j];
    };

    #pragma unroll 1
    for (int tile = 0; tile < tiles_k; ++tile) {
        fetch_tile();
        store_tile(0);
        __syncthreads();  // the tile is complete

        #pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            load_fragments(0, 0, kk);
            multiply(0);
        }
        __syncthreads();  // nobody reads the tile any more
    }

    // Write the thread's outputs, vec_c at a time.
    const int c_row = block_row + warp_m * WM + lane_m * VM;
    const int c_col = block_col + warp_n * WN + lane_n * VN;
    float* const c_thread = C + c_row * ldc + c_col;
    #pragma unroll
    for (int i = 0; i < TM; ++i)
        #pragma unroll
        for (int j = 0; j < TN; j += vec_c) {
            const int row = i / VM * (LM * VM) + i % VM, col = j / VN * (LN * VN) + j % VN;
            auto* const to = reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col);
            Vector<vec_c> out;
            #pragma unroll
            for (int v = 0; v < vec_c; ++v)
                out.lane[v] = alpha * acc[i][j + v];
            *to = out;
        }
}
