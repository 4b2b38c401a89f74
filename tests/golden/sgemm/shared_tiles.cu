// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nt
// config   turn_a0-turn_b0-BM128-TM8-LM2-BN128-TN8-rows-VM4-VN4-BK8-split_k0-cluster_k1-warps_k1-cp_async-stages2-transpose_a1-transpose_b1-read_k1-vec_a1-vec_b1-vec_c4-spread_n0-smem_pad4-shifted-fragment_pipeline1-unroll_stages1-serpentine-group_m1-min_blocks2
// template

// The problem.
constexpr int m = 3552;  // rows of C
constexpr int n = 736;  // columns of C
constexpr int k = 6321;  // length of a dot product
constexpr long long lda = 6321, ldb = 6321, ldc = 736;  // floats from one stored row to the next

// The choice.
constexpr int BM = 128, BN = 128;  // block tile of C
constexpr int BK = 8;  // depth of one step along k
constexpr int LM = 2, LN = 16;  // lanes of a warp
constexpr int TM = 8, TN = 8;  // outputs of one thread
constexpr int VM = 4, VN = 4;  // contiguous fragments of a thread's rows and columns
constexpr int stages = 2;  // shared-memory buffers
constexpr int vec_a = 1, vec_b = 1, vec_c = 4;  // floats per global access
constexpr int smem_pad = 4;  // floats added to shared rows that are written across
constexpr int group_m = 1;  // rows of tiles worked on together

// What follows from it.
constexpr int WM = LM * TM, WN = LN * TN;  // warp tile
constexpr int warps_n = BN / WN;
constexpr int num_threads = 32 * (BM / WM) * warps_n;
constexpr int tiles_m = 28, tiles_n = 6;  // block tiles of C
constexpr int tiles_k = 791;  // steps along k
constexpr int first_k = 1;  // depth of the first step: the remainder comes first, so the others need no check
constexpr int As_row = BM + smem_pad;  // floats from one shared row to the next
constexpr int Bs_row = BN + smem_pad;
constexpr int As_stage = BK * As_row;  // floats of one buffer
constexpr int Bs_stage = BK * Bs_row;

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
__device__ __forceinline__ Vector<vec_c> output(const float* sums, float alpha)
{
    Vector<vec_c> out;
    #pragma unroll
    for (int v = 0; v < vec_c; ++v)
        out.lane[v] = alpha * sums[v];
    return out;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer)
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

// How a tile lies in shared memory: as in the matrix, or turned, its columns being rows.
enum Kept { as_stored, turned };

// A tile of `rows` stored rows of `cols` floats; rows are ld floats apart in the matrix and shared_row in shared memory. Each
// thread moves its share, vec floats at a time.
template <int rows, int cols, int vec, long long ld, int shared_row, Kept kept = as_stored>
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
        return kept == turned ? col * shared_row + row : row * shared_row + col;
    }

    // Start a thread's copies to shared memory, the first of which lies at at_row, at_col. What does not lie before the ends is zero.
    __device__ __forceinline__ static void copy(unsigned to, const float* from,
        int at_row = 0, int end_row = rows, int at_col = 0, int end_col = cols)
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i) {
            const int row = row_of(i), col = col_of(i);
            const bool inside = at_row + row < end_row && at_col + col < end_col;
            cp_async<4 * vec>(to + 4 * place(row, col), from + row * ld + col, inside);
        }
    }
};

// Count up to `last`, then start again at 0; what the block wrote before is visible to whoever counts later.
__device__ __forceinline__ unsigned count_in(unsigned* counter, unsigned last)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// Read what another block wrote: from L2, since the SMs' own caches do not see each other's writes.
template <int width>
__device__ __forceinline__ Vector<width> load_from_l2(const Vector<width>* from)
{
    Vector<width> to;
    if constexpr (width == 4)
        asm volatile("ld.global.cg.v4.f32 { %0, %1, %2, %3 }, [%4];"
                     : "=f"(to.lane[0]), "=f"(to.lane[1]), "=f"(to.lane[2]), "=f"(to.lane[3])
                     : "l"(from)
                     : "memory");
    else if constexpr (width == 2)
        asm volatile("ld.global.cg.v2.f32 { %0, %1 }, [%2];" : "=f"(to.lane[0]), "=f"(to.lane[1]) : "l"(from) : "memory");
    else
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(to.lane[0]) : "l"(from) : "memory");
    return to;
}

// From compute capability 9.0 on a kernel is launched when the blocks of the one before it have ended (programmatic dependent
// launch), which may be before their writes are seen: so it waits for that first.
__device__ __forceinline__ void wait_for_turn()
{
    #if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    #endif
}

extern "C" __global__ void __launch_bounds__(num_threads, 2)
sgemm(float alpha, const float* A, const float* B, float beta, float* C, float* workspace)
{
    wait_for_turn();
    extern __shared__ __align__(16) float shared[];
    float* const As = shared;                      // [stages][BK][As_row]
    float* const Bs = shared + stages * As_stage;  // [stages][BK][Bs_row]

    // The first blocks compute a tile each. Then as many blocks as run at a time share the last tiles evenly: each does a stretch of
    // their steps, taken in order, so it may do the end of one tile and begin the next one. No part is shorter than the buffers.
    constexpr int tiles = 168;  // that are shared
    constexpr int whole_tiles = tiles_m * tiles_n - tiles, shared_from = whole_tiles * tiles_k;
    constexpr int sharers = 264, share = tiles * tiles_k / sharers, longer = tiles * tiles_k % sharers;  // so many have a step more
    auto begin_of = [](int number) {
        const int begin = number * share + min(number, longer), in_tile = begin % tiles_k;
        return shared_from + begin + (in_tile < stages ? -in_tile : tiles_k - in_tile < stages ? tiles_k - in_tile : 0);
    };
    const int sharer = int(blockIdx.x) - whole_tiles;  // negative where the block has a tile of its own
    int next_step = sharer < 0 ? blockIdx.x * tiles_k : begin_of(sharer);
    const int end_step = sharer < 0 ? next_step + tiles_k : begin_of(sharer + 1);
    while (next_step < end_step) {
        const int tile_id = next_step / tiles_k, tile_step = tile_id * tiles_k, first_step = next_step - tile_step;
        const int steps = min(tiles_k - first_step, end_step - next_step);
        next_step += steps;
        __syncthreads();  // nobody reads shared memory of the tile before

        int thread;  // read anew for each tile, so that nothing which follows from it takes registers meanwhile
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int warp = thread / 32, lane = thread % 32;
        const int warp_m = warp / warps_n, warp_n = warp % warps_n;
        const int lane_m = lane / LN, lane_n = lane % LN;
        const int part_k = max(0, first_step * BK - (BK - first_k));  // where the part begins
        const int first_depth = first_step == 0 ? first_k : BK;  // depth of its first step
        // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
        // their tiles of A and B in L2.
        constexpr int group_tiles = group_m * tiles_n;
        const int group = tile_id / group_tiles, in_group = tile_id % group_tiles;
        constexpr int group_rows = group_m;
        const int tile_row = (group * group_m + in_group % group_rows) * BM;  // the first row that this block writes
        const int block_row = min(tile_row, m - BM);  // the last tile begins earlier instead of reaching over the edge
        const int tile_col = in_group / group_rows * BN;  // the first column that this block writes
        const int block_col = min(tile_col, n - BN);

        // A is stored along k: where a thread's first move lies in the tile, and in memory.
        using TileA = Tile<BM, BK, vec_a, lda, As_row, turned>;
        const int a_m = TileA::first_row(thread), a_k = TileA::first_col(thread);
        const float* a_global = A + (block_row + a_m) * lda + (part_k + a_k);

        // B is stored along k.
        using TileB = Tile<BN, BK, vec_b, ldb, Bs_row, turned>;
        const int b_n = TileB::first_row(thread), b_k = TileB::first_col(thread);
        const float* b_global = B + (block_col + b_n) * ldb + (part_k + b_k);
        const unsigned a_shared = shared_address(As + TileA::place(a_m, a_k));
        const unsigned b_shared = shared_address(Bs + TileB::place(b_n, b_k));

        // Start copying the next tile of A and of B into buffer `stage`; they are `depth` deep, the rest is zero.
        auto load_tile = [&](int stage, int depth = BK) {
            TileA::copy(a_shared + 4 * stage * As_stage, a_global, 0, BM, depth < BK ? a_k : 0, depth);
            TileB::copy(b_shared + 4 * stage * Bs_stage, b_global, 0, BN, depth < BK ? b_k : 0, depth);
            a_global += depth;
            b_global += depth;
        };

        // Where the fragments of a thread begin.
        const float* const a_fragments = As + warp_m * WM + lane_m * VM;
        const float* const b_fragments = Bs + warp_n * WN + lane_n * VN;
        alignas(16) float reg_m[2][TM], reg_n[2][TN];
        float acc[TM][TN] = {};

        // Read row kk of buffer `stage`: the operands of TM * TN FFMAs.
        auto load_fragments = [&](int half, int stage, int kk) {
            constexpr int read_m = VM < 4 ? VM : 4;
            #pragma unroll
            for (int i = 0; i < TM; i += read_m)
                move<read_m>(&reg_m[half][i], &a_fragments[stage * As_stage + kk * As_row + row_of(i)]);
            constexpr int read_n = VN < 4 ? VN : 4;
            #pragma unroll
            for (int j = 0; j < TN; j += read_n)
                move<read_n>(&reg_n[half][j], &b_fragments[stage * Bs_stage + kk * Bs_row + col_of(j)]);
        };

        // acc += reg_m x reg_n; odd rows run backwards, so that one operand stays in the reuse cache at each turn.
        auto multiply = [&](int half) {
            #pragma unroll
            for (int i = 0; i < TM; ++i)
                #pragma unroll
                for (int step = 0; step < TN; ++step) {
                    const int j = i % 2 ? TN - 1 - step : step;
                    acc[i][j] += reg_m[half][i] * reg_n[half][j];
                }
        };

        // Fill every buffer but one.
        #pragma unroll
        for (int stage = 0; stage < stages - 1; ++stage) {
            load_tile(stage, stage == 0 ? first_depth : BK);
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

        // Rounds in which more tiles follow, and what is left one by one: whether one follows would be a branch in each step.
        int tile = 0;
        #pragma unroll 1
        for (; tile + 2 * stages - 1 <= steps; tile += stages)
            #pragma unroll
            for (int s = 0; s < stages; ++s)
                step(s, (s + 1) % stages, (s + stages - 1) % stages, true);

        int stage = 0, vacant = stages - 1;
        #pragma unroll 1
        for (; tile < steps; ++tile) {
            const int next = stage + 1 == stages ? 0 : stage + 1;
            step(stage, next, vacant, tile + stages - 1 < steps);
            vacant = stage;
            stage = next;
        }

        if (steps < tiles_k) {
            // Other blocks have the other steps of this tile. The one that is done last adds all sums up, in the order of k, so that the
            // result does not depend on which one that is. The counters, [tiles], are zero between launches; behind them is kept
            // [tiles][3][outputs][num_threads], one float at a time: four would decide the register banks of the main loop.
            constexpr int outputs = TM * TN, most_parts = 3;
            constexpr int counters = 192;  // floats before the sums: whole lines
            auto sharer_of = [&](int step) {  // where a stretch does not begin
                step += tile_step - shared_from;
                return step < longer * (share + 1) ? step / (share + 1) : (step - longer) / share;
            };
            const int first_sharer = sharer_of(stages - 1), parts = sharer_of(tiles_k - stages) - first_sharer + 1;
            float* kept = workspace + counters + (tile_id - whole_tiles) * (most_parts * BM * BN) + thread;
            float* const own_kept = kept + (sharer - first_sharer) * (BM * BN);
            #pragma unroll
            for (int i = 0; i < outputs; ++i)
                own_kept[i * num_threads] = acc[i / TN][i % TN];
            auto* const arrivals = reinterpret_cast<unsigned*>(workspace) + (tile_id - whole_tiles);
            __syncthreads();
            if (!__syncthreads_or(thread == 0 && count_in(arrivals, parts - 1) == parts - 1))
                continue;
            #pragma unroll
            for (int i = 0; i < outputs; ++i)
                acc[i / TN][i % TN] = 0.0f;
            #pragma unroll 1
            for (int part = 0; part < parts; ++part, kept += BM * BN)
                #pragma unroll
                for (int i = 0; i < outputs; ++i)
                    acc[i / TN][i % TN] += load_from_l2(reinterpret_cast<const Vector<1>*>(kept + i * num_threads)).lane[0];
        }

        // Write the thread's outputs, vec_c at a time.
        const int c_row = block_row + warp_m * WM + lane_m * VM;
        const int c_col = block_col + warp_n * WN + lane_n * VN;
        float* const c_thread = C + c_row * ldc + c_col;
        auto place = [&](int row, int col) { return reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col); };
        auto inside = [&](int row, int col) { return c_row + row >= tile_row && c_col + col >= tile_col; };
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            #pragma unroll
            for (int j = 0; j < TN; j += vec_c) {
                const int row = row_of(i), col = col_of(j);
                if (!inside(row, col))
                    continue;
                auto* const to = place(row, col);
                *to = output(&acc[i][j], alpha);
            }
    }
}
