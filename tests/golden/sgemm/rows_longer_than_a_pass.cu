// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt
// config   BM128-TM8-LM16-BN32-TN16-VM4-VN4-BK8-split_k1-cluster_k1-warps_k1-cp_async-stages4-transpose_a1-transpose_b1-read_k1-vec_a1-vec_b1-vec_c1-spread_n0-smem_pad4-shifted-fragment_pipeline1-unroll_stages0-blocked-group_m1-min_blocks1
// template

// The problem.
constexpr int m = 4095;  // rows of C
constexpr int n = 4097;  // columns of C
constexpr int k = 1023;  // length of a dot product
constexpr long long lda = 4095, ldb = 1023, ldc = 4097;  // floats from one stored row to the next

// The choice.
constexpr int BM = 128, BN = 32;  // block tile of C
constexpr int BK = 8;  // depth of one step along k
constexpr int LM = 16, LN = 2;  // lanes of a warp
constexpr int TM = 8, TN = 16;  // outputs of one thread
constexpr int VM = 4, VN = 4;  // contiguous fragments of a thread's rows and columns
constexpr int stages = 4;  // shared-memory buffers
constexpr int vec_a = 1, vec_b = 1, vec_c = 1;  // floats per global access
constexpr int smem_pad = 4;  // floats added to shared rows that are written across
constexpr int group_m = 1;  // rows of tiles worked on together

// What follows from it.
constexpr int WM = LM * TM, WN = LN * TN;  // warp tile
constexpr int warps_n = BN / WN;
constexpr int num_threads = 32 * (BM / WM) * warps_n;
constexpr int tiles_m = 32, tiles_n = 129;  // block tiles of C
constexpr int tiles_k = 128;  // steps along k
constexpr int first_k = 7;  // depth of the first step: the remainder comes first, so the others need no check
constexpr int As_row = BM;  // floats from one shared row to the next
constexpr int Bs_row = BN + smem_pad;
constexpr int As_stage = BK * As_row;  // floats of one buffer
constexpr int Bs_stage = BK * Bs_row;

static_assert(LM * LN == 32, "a warp has 32 lanes");
static_assert(BM % WM == 0 && BN % WN == 0, "whole warp tiles fill the block tile");
static_assert(TM % VM == 0 && TN % VN == 0, "whole fragments fill the thread tile");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert((BM * BK / vec_a) % num_threads == 0, "every thread copies the same share of A's tile");
static_assert((BN * BK / vec_b) % num_threads == 0, "every thread copies the same share of B's tile");
static_assert(lda % vec_a == 0 && ldb % vec_b == 0 && ldc % vec_c == 0, "vectors are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

__device__ __forceinline__ unsigned shared_address(const float* pointer)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Start copying `bytes` bytes from global to shared memory; zeros arrive instead where `inside` is false.
template <int bytes>
__device__ __forceinline__ void cp_async(unsigned to, const float* from, bool inside = true)
{
    if constexpr (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(bytes), "r"(inside ? bytes : 0) : "memory");
}

// Close the group of copies started since the last commit.
__device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most `pending` groups of this thread are still on their way.
template <int pending>
__device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

extern "C" __global__ void __launch_bounds__(num_threads, 1)
sgemm(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    extern __shared__ __align__(16) float shared[];
    float* const As = shared;                      // [stages][BK][As_row]
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
    const int tile_row = (group * group_m + in_group % group_rows) * BM;  // the first row that this block writes
    const int block_row = min(tile_row, m - BM);  // the last tile begins earlier instead of reaching over the edge
    const int tile_col = in_group / group_rows * BN;  // the first column that this block writes
    const int block_col = min(tile_col, n - BN);

    // A: the tile is BK stored rows of BM floats, moved vec_a at a time.
    constexpr int a_width = BM / vec_a;  // moves along one stored row
    constexpr int a_moves = BM * BK / vec_a / num_threads;  // moves of one thread
    constexpr int a_passes = a_width / num_threads;  // passes of the block along one stored row
    const int a_row = 0, a_col = thread * vec_a;
    const float* a_global = A + a_row * lda + (block_row + a_col);

    // B: the tile is BN stored rows of BK floats, moved vec_b at a time.
    constexpr int b_width = BK / vec_b;  // moves along one stored row
    constexpr int b_moves = BN * BK / vec_b / num_threads;  // moves of one thread
    constexpr int b_rows = num_threads / b_width;  // stored rows between a thread's moves
    const int b_row = thread / b_width, b_col = thread % b_width * vec_b;
    const float* b_global = B + (block_col + b_row) * ldb + b_col;

    const unsigned a_shared = shared_address(As + a_row * As_row + a_col);
    const unsigned b_shared = shared_address(Bs + b_col * Bs_row + b_row);

    // Start copying the first tile of A and of B into buffer 0; they are `depth` deep, the rest is zero.
    auto load_first_tile = [&](int depth) {
        constexpr int stage = 0;
        #pragma unroll
        for (int i = 0; i < a_moves; ++i) {
            const int row = i / a_passes, col = i % a_passes * num_threads * vec_a;
            const bool inside = a_row + row < depth;
            cp_async<4 * vec_a>(a_shared + 4 * (stage * As_stage + row * As_row + col), a_global + row * lda + col, inside);
        }
        #pragma unroll
        for (int i = 0; i < b_moves; ++i) {
            const int row = i * b_rows, col = 0;
            const bool inside = b_col + col < depth;
            cp_async<4 * vec_b>(b_shared + 4 * (stage * Bs_stage + col * Bs_row + row), b_global + row * ldb + col, inside);
        }
        a_global += depth * lda;
        b_global += depth;
    };

    // Start copying the next tile of A and of B into buffer `stage`.
    auto load_tile = [&](int stage) {
        #pragma unroll
        for (int i = 0; i < a_moves; ++i) {
            const int row = i / a_passes, col = i % a_passes * num_threads * vec_a;
            cp_async<4 * vec_a>(a_shared + 4 * (stage * As_stage + row * As_row + col), a_global + row * lda + col);
        }
        #pragma unroll
        for (int i = 0; i < b_moves; ++i) {
            const int row = i * b_rows, col = 0;
            cp_async<4 * vec_b>(b_shared + 4 * (stage * Bs_stage + col * Bs_row + row), b_global + row * ldb + col);
        }
        a_global += BK * lda;
        b_global += BK;
    };

    // A thread's rows lie in fragments of VM, LM * VM apart, so that the lanes of a warp read without bank conflicts;
    // its columns likewise.
    const float* const a_fragments = As + warp_m * WM + lane_m * VM;
    const float* const b_fragments = Bs + warp_n * WN + lane_n * VN;
    alignas(16) float reg_m[2][TM], reg_n[2][TN];
    float acc[TM][TN] = {};

    // Read row kk of buffer `stage`: the operands of TM * TN FFMAs.
    auto load_fragments = [&](int half, int stage, int kk) {
        constexpr int read_m = VM < 4 ? VM : 4;
        #pragma unroll
        for (int i = 0; i < TM; i += read_m)
            *reinterpret_cast<Vector<read_m>*>(&reg_m[half][i]) = *reinterpret_cast<const Vector<read_m>*>(
                &a_fragments[stage * As_stage + kk * As_row + i / VM * (LM * VM) + i % VM]);
        constexpr int read_n = VN < 4 ? VN : 4;
        #pragma unroll
        for (int j = 0; j < TN; j += read_n)
            *reinterpret_cast<Vector<read_n>*>(&reg_n[half][j]) = *reinterpret_cast<const Vector<read_n>*>(
                &b_fragments[stage * Bs_stage + kk * Bs_row + j / VN * (LN * VN) + j % VN]);
    };

    // acc += reg_m x reg_n, four rows at a time; every second block of rows runs backwards.
    auto multiply = [&](int half) {
        #pragma unroll
        for (int block = 0; block < TM; block += 4)
            #pragma unroll
            for (int step = 0; step < TN; ++step) {
                const int j = block % 8 ? TN - 1 - step : step;
                #pragma unroll
                for (int i = block; i < block + 4; ++i)
                    acc[i][j] += reg_m[half][i] * reg_n[half][j];
            }
    };

    // Fill every buffer but one.
    load_first_tile(first_k);
    cp_async_commit();
    #pragma unroll
    for (int stage = 1; stage < stages - 1; ++stage) {
        load_tile(stage);
        cp_async_commit();
    }
    cp_async_wait<stages - 2>();
    __syncthreads();
    load_fragments(0, 0, 0);

    // Compute on buffer `stage` while a later tile is on its way to the `vacant` one, which all threads left at the
    // last barrier. `more`: there is such a tile.
    auto step = [&](int stage, int next, int vacant, bool more) {
        #pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            // The operands of the next FFMAs are read before these start, those of the next tile too.
            if (kk < BK - 1) {
                load_fragments((kk + 1) % 2, stage, kk + 1);
            } else {
                cp_async_wait<stages - 2>();
                __syncthreads();
                load_fragments((kk + 1) % 2, next, 0);
            }
            if (kk == 0) {
                if (more)
                    load_tile(vacant);
                cp_async_commit();
            }
            multiply(kk % 2);
        }
    };

    int stage = 0, vacant = stages - 1;
    #pragma unroll 1
    for (int tile = 0; tile < tiles_k; ++tile) {
        const int next = stage + 1 == stages ? 0 : stage + 1;
        step(stage, next, vacant, tile + stages - 1 < tiles_k);
        vacant = stage;
        stage = next;
    }

    // Write the thread's outputs, vec_c at a time.
    const int c_row = block_row + warp_m * WM + lane_m * VM;
    const int c_col = block_col + warp_n * WN + lane_n * VN;
    float* const c_thread = C + c_row * ldc + c_col;
    // Of some rows at a time all of C is read before any of it is written: a read behind a write waits for it.
    constexpr int read_rows = 1;
    #pragma unroll
    for (int first = 0; first < TM; first += read_rows) {
        Vector<vec_c> old[read_rows][TN / vec_c] = {};
        if (beta != 0.0f) {  // C is not read otherwise: it may hold NaN
            #pragma unroll
            for (int i = first; i < first + read_rows; ++i)
                #pragma unroll
                for (int j = 0; j < TN; j += vec_c) {
                    const int row = i / VM * (LM * VM) + i % VM, col = j / VN * (LN * VN) + j % VN;
                    if (c_row + row < tile_row || c_col + col < tile_col)
                        continue;
                    old[i - first][j / vec_c] = *reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col);
                }
        }
        __syncwarp();  // else the compiler lets the reads sink to the writes, to save registers
        #pragma unroll
        for (int i = first; i < first + read_rows; ++i)
            #pragma unroll
            for (int j = 0; j < TN; j += vec_c) {
                const int row = i / VM * (LM * VM) + i % VM, col = j / VN * (LN * VN) + j % VN;
                if (c_row + row < tile_row || c_col + col < tile_col)
                    continue;
                auto* const to = reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col);
                Vector<vec_c> out;
                #pragma unroll
                for (int v = 0; v < vec_c; ++v)
                    out.lane[v] = alpha * acc[i][j + v] + beta * old[i - first][j / vec_c].lane[v];
                *to = out;
            }
    }
}
