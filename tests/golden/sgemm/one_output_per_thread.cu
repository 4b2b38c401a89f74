// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nn
// config   turn_a0-turn_b0-BM16-TM1-LM4-BN16-TN1-rows-VM1-VN1-BK16-split_k1-cluster_k1-warps_k1-reg-stages1-transpose_a0-transpose_b1-read_k1-vec_a1-vec_b1-vec_c1-spread_n0-smem_pad0-exact-fragment_pipeline0-unroll_stages0-row-group_m1-min_blocks1
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

// Where output row i and column j of a thread lie behind its first: after each fragment of VM, or VN, come those of the other
// lanes, so that the lanes of a warp read shared memory without bank conflicts.
__device__ constexpr int row_of(int i) { return i + i / VM * ((LM - 1) * VM); }
__device__ constexpr int col_of(int j) { return j + j / VN * ((LN - 1) * VN); }

static_assert(LM * LN == 32, "a warp has 32 lanes");
static_assert(BM % WM == 0 && BN % WN == 0, "whole warp tiles fill the block tile");
static_assert(TM % VM == 0 && TN % VN == 0, "whole fragments fill the thread tile");
static_assert(m % BM == 0 && n % BN == 0, "tiles end at the edge of C");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert(lda % vec_a == 0 && ldb % vec_b == 0 && ldc % vec_c == 0, "vectors are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

// Move `width` floats in one instruction.
template <int width>
__device__ __forceinline__ void move(float* to, const float* from)
{
    *reinterpret_cast<Vector<width>*>(to) = *reinterpret_cast<const Vector<width>*>(from);
}

// The outputs of vec_c sums.
__device__ __forceinline__ Vector<vec_c> output(const float* sums, float alpha)
{
    Vector<vec_c> out;
    #pragma unroll
    for (int v = 0; v < vec_c; ++v)
        out.lane[v] = alpha * sums[v];
    return out;
}

// A tile of `rows` stored rows of `cols` floats; rows are ld floats apart in the matrix and shared_row in shared memory. Each
// thread moves its share, vec floats at a time.
template <int rows, int cols, int vec, long long ld, int shared_row>
struct Tile {
    static constexpr int width = cols / vec;  // moves along one stored row
    static constexpr int moves = rows * width / num_threads;  // moves of one thread
    static constexpr int passes = width > num_threads ? width / num_threads : 1;  // of the block along one stored row
    static constexpr int step = passes > 1 ? 1 : num_threads / width;  // stored rows between a thread's moves
    static_assert(rows * width % num_threads == 0, "every thread moves the same share of a tile");

    // Stored row and column of a thread's first move.
    __device__ static int first_row(int thread) { return passes > 1 ? 0 : thread / width; }
    __device__ static int first_col(int thread) { return (passes > 1 ? thread : thread % width) * vec; }

    // Those of its move i, counted from there.
    __device__ static constexpr int row_of(int i) { return i / passes * step; }
    __device__ static constexpr int col_of(int i) { return i % passes * (num_threads * vec); }

    // Where a stored row and column lie in shared memory.
    __device__ static constexpr int place(int row, int col)
    {
        return row * shared_row + col;
    }

    // Read a thread's moves.
    __device__ __forceinline__ static void fetch(Vector<vec> (&staged)[moves], const float* from)
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i) {
            const int row = row_of(i), col = col_of(i);
            const auto* const stored = reinterpret_cast<const Vector<vec>*>(from + row * ld + col);
            staged[i] = *stored;
        }
    }

    // Write them to shared memory.
    __device__ __forceinline__ static void store(float* to, const Vector<vec> (&staged)[moves])
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i)
            *reinterpret_cast<Vector<vec>*>(to + place(row_of(i), col_of(i))) = staged[i];
    }
};

// From compute capability 9.0 on a kernel is launched when the blocks of the one before it have ended (programmatic dependent
// launch), which may be before their writes are seen: so it waits for that first.
__device__ __forceinline__ void wait_for_turn()
{
    #if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    #endif
}

extern "C" __global__ void __launch_bounds__(num_threads, 1)
sgemm(float alpha, const float* A, const float* B, float beta, float* C)
{
    wait_for_turn();
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

    // A is stored along k: where a thread's first move lies in the tile, and in memory.
    using TileA = Tile<BM, BK, vec_a, lda, As_row>;
    const int a_m = TileA::first_row(thread), a_k = TileA::first_col(thread);
    const float* a_global = A + (block_row + a_m) * lda + a_k;

    // B is stored along n.
    using TileB = Tile<BK, BN, vec_b, ldb, Bs_row>;
    const int b_k = TileB::first_row(thread), b_n = TileB::first_col(thread);
    const float* b_global = B + b_k * ldb + (block_col + b_n);
    const int a_shared = TileA::place(a_m, a_k), b_shared = TileB::place(b_k, b_n);
    Vector<vec_a> a_staged[TileA::moves];
    Vector<vec_b> b_staged[TileB::moves];

    // Read the next tile of A and of B into registers.
    auto fetch_tile = [&]() {
        TileA::fetch(a_staged, a_global);
        TileB::fetch(b_staged, b_global);
        a_global += BK;
        b_global += BK * ldb;
    };

    // Write the tile that was read last into buffer `stage`.
    auto store_tile = [&](int stage) {
        TileA::store(As + (stage * As_stage + a_shared), a_staged);
        TileB::store(Bs + (stage * Bs_stage + b_shared), b_staged);
    };

    // Where the fragments of a thread begin.
    const float* const a_fragments = As + (warp_m * WM + lane_m * VM) * As_row;
    const float* const b_fragments = Bs + warp_n * WN + lane_n * VN;
    alignas(16) float reg_m[1][TM], reg_n[1][TN];
    float acc[TM][TN] = {};

    // Read row kk of buffer `stage`: the operands of TM * TN FFMAs.
    auto load_fragments = [&](int half, int stage, int kk) {
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            reg_m[half][i] = a_fragments[stage * As_stage + row_of(i) * As_row + kk];
        constexpr int read_n = VN < 4 ? VN : 4;
        #pragma unroll
        for (int j = 0; j < TN; j += read_n)
            move<read_n>(&reg_n[half][j], &b_fragments[stage * Bs_stage + kk * Bs_row + col_of(j)]);
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
    auto place = [&](int row, int col) { return reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col); };
    #pragma unroll
    for (int i = 0; i < TM; ++i)
        #pragma unroll
        for (int j = 0; j < TN; j += vec_c) {
            const int row = row_of(i), col = col_of(j);
            auto* const to = place(row, col);
            *to = output(&acc[i][j], alpha);
        }
}
