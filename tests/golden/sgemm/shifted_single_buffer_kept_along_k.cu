// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt
// config   turn_a0-turn_b0-BM32-TM8-LM4-BN128-TN8-pairs-VM4-VN1-BK64-split_k1-cluster_k1-warps_k2-reg-stages1-transpose_a1-transpose_b0-read_k4-vec_a4-vec_b1-vec_c1-spread_n0-smem_pad4-shifted-fragment_pipeline0-unroll_stages0-serpentine-group_m1-min_blocks1
// template

// The problem.
constexpr int m = 100;  // rows of C
constexpr int n = 70;  // columns of C
constexpr int k = 33;  // length of a dot product
constexpr long long lda = 100, ldb = 33, ldc = 70;  // floats from one stored row to the next

// The choice.
constexpr int BM = 32, BN = 128;  // block tile of C
constexpr int BK = 64;  // depth of one step along k
constexpr int warps_k = 2;  // warps that share a tile and take turns along k
constexpr int LM = 4, LN = 8;  // lanes of a warp
constexpr int TM = 8, TN = 8;  // outputs of one thread
constexpr int VM = 4, VN = 1;  // contiguous fragments of a thread's rows and columns
constexpr int read_k = 4;  // steps along k that one fragment covers
constexpr int stages = 1;  // shared-memory buffers
constexpr int vec_a = 4, vec_b = 1, vec_c = 1;  // floats per global access
constexpr int smem_pad = 4;  // floats added to shared rows that are written across
constexpr int group_m = 1;  // rows of tiles worked on together

// What follows from it.
constexpr int WM = LM * TM, WN = LN * TN;  // warp tile
constexpr int warps_n = BN / WN;
constexpr int warps_m = BM / WM;
constexpr int num_threads = 32 * warps_m * warps_n * warps_k;
constexpr int reads = BK / (warps_k * read_k);  // times in a step that a thread reads fragments
constexpr int tiles_m = 4, tiles_n = 1;  // block tiles of C
constexpr int tiles_k = 1;  // steps along k
constexpr int first_k = 33;  // depth of the first step: the remainder comes first, so the others need no check
constexpr int As_row = BM;  // floats from one shared row to the next
constexpr int Bs_row = BK + smem_pad;
constexpr int As_stage = BK * As_row;  // floats of one buffer
constexpr int Bs_stage = BN * Bs_row;

// Where output row i and column j of a thread lie behind its first: after each fragment of VM, or VN, come those of the other
// lanes, so that the lanes of a warp read shared memory without bank conflicts.
__device__ constexpr int row_of(int i) { return i + i / VM * ((LM - 1) * VM); }
__device__ constexpr int col_of(int j) { return j + j / VN * ((LN - 1) * VN); }

static_assert(LM * LN == 32, "a warp has 32 lanes");
static_assert(BM % WM == 0 && BN % WN == 0, "whole warp tiles fill the block tile");
static_assert(TM % VM == 0 && TN % VN == 0, "whole fragments fill the thread tile");
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
__device__ __forceinline__ Vector<vec_c> output(const float* sums, float alpha, float beta, const Vector<vec_c>& old)
{
    Vector<vec_c> out;
    #pragma unroll
    for (int v = 0; v < vec_c; ++v)
        out.lane[v] = alpha * sums[v] + beta * old.lane[v];
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

    // Read a thread's moves, the first of which lies at at_row, at_col. What does not lie before the ends is zero.
    __device__ __forceinline__ static void fetch(Vector<vec> (&staged)[moves], const float* from,
        int at_row = 0, int end_row = rows, int at_col = 0, int end_col = cols)
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i) {
            const int row = row_of(i), col = col_of(i);
            const auto* const stored = reinterpret_cast<const Vector<vec>*>(from + row * ld + col);
            staged[i] = at_row + row < end_row && at_col + col < end_col ? *stored : Vector<vec>{};
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

// Take `width` sums of a thread ...
template <int width>
__device__ __forceinline__ Vector<width> pack(const float* sums)
{
    Vector<width> packed;
    #pragma unroll
    for (int v = 0; v < width; ++v)
        packed.lane[v] = sums[v];
    return packed;
}

// ... and add others to them, or put the `first` ones there.
template <int width>
__device__ __forceinline__ void add_to(float* sums, Vector<width> more, bool first = false)
{
    #pragma unroll
    for (int v = 0; v < width; ++v)
        sums[v] = first ? more.lane[v] : sums[v] + more.lane[v];
}

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
    float* const As = shared;                      // [stages][BK][As_row]
    float* const Bs = shared + stages * As_stage;  // [stages][BN][Bs_row]

    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const int warp_k = warp / (warps_m * warps_n), warp_m = warp / warps_n % warps_m, warp_n = warp % warps_n;
    // Lanes i and i^1 read the same of A, i and i^2 the same of B: shared memory serves either in half as many passes.
    const int lane_place = (lane & 1) | (lane & 2) << 3 | lane >> 2 << 1;
    const int lane_m = lane_place / LN, lane_n = lane_place % LN;
    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = blockIdx.x / group_tiles, in_group = blockIdx.x % group_tiles;
    constexpr int group_rows = group_m;
    const int tile_row = (group * group_m + in_group % group_rows) * BM;  // the first row that this block writes
    const int block_row = min(tile_row, m - BM);  // the last tile begins earlier instead of reaching over the edge
    const int block_col = in_group / group_rows * BN;

    // A is stored along m: where a thread's first move lies in the tile, and in memory.
    using TileA = Tile<BK, BM, vec_a, lda, As_row>;
    const int a_k = TileA::first_row(thread), a_m = TileA::first_col(thread);
    const float* a_global = A + a_k * lda + (block_row + a_m);

    // B is stored along k.
    using TileB = Tile<BN, BK, vec_b, ldb, Bs_row>;
    const int b_n = TileB::first_row(thread), b_k = TileB::first_col(thread);
    const float* b_global = B + (block_col + b_n) * ldb + b_k;
    const int a_shared = TileA::place(a_k, a_m), b_shared = TileB::place(b_n, b_k);
    Vector<vec_a> a_staged[TileA::moves];
    Vector<vec_b> b_staged[TileB::moves];

    // Read the next tile of A and of B into registers; they are `depth` deep, the rest is zero.
    auto fetch_tile = [&](int depth = BK) {
        TileA::fetch(a_staged, a_global, depth < BK ? a_k : 0, depth, 0, BM);
        TileB::fetch(b_staged, b_global, block_col + b_n, n, depth < BK ? b_k : 0, depth);
        a_global += depth * lda;
        b_global += depth;
    };

    // Write the tile that was read last into buffer `stage`.
    auto store_tile = [&](int stage) {
        TileA::store(As + (stage * As_stage + a_shared), a_staged);
        TileB::store(Bs + (stage * Bs_stage + b_shared), b_staged);
    };

    // Where the fragments of a thread begin.
    const float* const a_fragments = As + warp_k * (BK / warps_k) * As_row + warp_m * WM + lane_m * VM;
    const float* const b_fragments = Bs + (warp_n * WN + lane_n * VN) * Bs_row + warp_k * (BK / warps_k);
    alignas(16) float reg_m[1][read_k][TM], reg_n[1][TN][read_k];
    float acc[TM][TN] = {};

    // Read rows read * read_k and the next ones of buffer `stage`: along k where an operand is kept so, else row by row.
    auto load_fragments = [&](int half, int stage, int read) {
        constexpr int read_m = VM < 4 ? VM : 4;
        #pragma unroll
        for (int r = 0; r < read_k; ++r)
            #pragma unroll
            for (int i = 0; i < TM; i += read_m)
                move<read_m>(&reg_m[half][r][i], &a_fragments[stage * As_stage + (read * read_k + r) * As_row + row_of(i)]);
        #pragma unroll
        for (int j = 0; j < TN; ++j)
            move<read_k>(reg_n[half][j], &b_fragments[stage * Bs_stage + col_of(j) * Bs_row + read * read_k]);
    };

    // acc += reg_m x reg_n, column by column, as all floats of a read of B lie in one register bank, and those of A take turns;
    // odd columns run backwards, so that one operand stays in the reuse cache at each turn.
    auto multiply_step = [&](int half, int r) {
        #pragma unroll
        for (int j = 0; j < TN; ++j)
            #pragma unroll
            for (int step = 0; step < TM; ++step) {
                const int i = j % 2 ? TM - 1 - step : step;
                acc[i][j] += reg_m[half][r][i] * reg_n[half][j][r];
            }
    };

    // One read's worth of FFMAs.
    auto multiply = [&](int half) {
        #pragma unroll
        for (int r = 0; r < read_k; ++r)
            multiply_step(half, r);
    };

    #pragma unroll 1
    for (int tile = 0; tile < tiles_k; ++tile) {
        fetch_tile(tile == 0 ? first_k : BK);
        store_tile(0);
        __syncthreads();  // the tile is complete

        #pragma unroll
        for (int kk = 0; kk < reads; ++kk) {
            load_fragments(0, 0, kk);
            multiply(0);
        }
        __syncthreads();  // nobody reads the tile any more
    }

    // Warps that took turns along k add up their sums in shared memory, in the order of k; each then owns some rows.
    constexpr int turn_threads = num_threads / warps_k;  // threads of one turn
    constexpr int own_rows = TM / warps_k;
    constexpr int add_width = TN < 4 ? TN : 4, adds = TN / add_width;  // vectors of one row of a thread
    const int own_first = warp_k * own_rows;
    auto* const warp_sums = reinterpret_cast<Vector<add_width>*>(shared) + thread % turn_threads;  // [warps_k][TM][adds][turn_threads]
    float own[own_rows][TN];
    __syncthreads();  // nobody reads the last tile any more
    #pragma unroll
    for (int i = 0; i < TM; ++i)
        #pragma unroll
        for (int j = 0; j < adds; ++j)
            warp_sums[((warp_k * TM + i) * adds + j) * turn_threads] = pack<add_width>(&acc[i][j * add_width]);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < own_rows; ++i)
        #pragma unroll
        for (int j = 0; j < adds; ++j)
            #pragma unroll
            for (int turn = 0; turn < warps_k; ++turn)
                add_to(&own[i][j * add_width], warp_sums[((turn * TM + own_first + i) * adds + j) * turn_threads], turn == 0);

    // Write the thread's outputs, vec_c at a time.
    const int c_row = block_row + warp_m * WM + lane_m * VM;
    const int c_col = block_col + warp_n * WN + lane_n * VN;
    float* const c_thread = C + c_row * ldc + c_col;
    auto place = [&](int row, int col) { return reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col); };
    auto inside = [&](int row, int col) { return c_row + row >= tile_row && c_col + col < n; };
    // Of some rows at a time all of C is read before any of it is written: a read behind a write waits for it.
    constexpr int read_rows = 2;
    #pragma unroll
    for (int first = 0; first < own_rows; first += read_rows) {
        Vector<vec_c> old[read_rows][TN / vec_c] = {};
        if (beta != 0.0f)  // C is not read otherwise: it may hold NaN
            #pragma unroll
            for (int i = first; i < first + read_rows; ++i)
                #pragma unroll
                for (int j = 0; j < TN; j += vec_c) {
                    const int row = row_of(own_first + i), col = col_of(j);
                    if (inside(row, col))
                        old[i - first][j / vec_c] = *place(row, col);
                }
        __syncwarp();  // else the compiler lets the reads sink to the writes, to save registers
        #pragma unroll
        for (int i = first; i < first + read_rows; ++i)
            #pragma unroll
            for (int j = 0; j < TN; j += vec_c) {
                const int row = row_of(own_first + i), col = col_of(j);
                if (!inside(row, col))
                    continue;
                auto* const to = place(row, col);
                *to = output(&own[i][j], alpha, beta, old[i - first][j / vec_c]);
            }
    }
}
