// Kernels and globals that the cases load.
extern "C" {

__device__ int number = 42;
__device__ int table[64];
__constant__ float factors[4] = {1, 2, 3, 4};

__global__ void nothing() {}

__global__ void add(int *sum, int value) { atomicAdd(sum, value); }

// Parameters whose offsets are not the sum of sizes.
__global__ void mixed(char a, double b, const int *c, short d, int *out) { *out = a + (int)b + *c + d; }

__global__ void __launch_bounds__(128) bounded(int *out) { out[threadIdx.x] = threadIdx.x; }

__global__ void with_shared(int *out) {
    extern __shared__ int dynamic[];
    __shared__ int fixed[32];
    fixed[threadIdx.x % 32] = threadIdx.x;
    dynamic[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) *out = dynamic[blockDim.x - 1] + fixed[0];
}

__global__ void read_globals(int *out) {
    out[0] = number;
    out[1] = table[3];
    out[2] = (int)(factors[0] + factors[3]);
}

__global__ void dimensions(int *out) {
    if (threadIdx.x == blockDim.x - 1 && blockIdx.x == gridDim.x - 1 && threadIdx.y == blockDim.y - 1 &&
        blockIdx.y == gridDim.y - 1 && threadIdx.z == blockDim.z - 1 && blockIdx.z == gridDim.z - 1) {
        int of[] = {(int)gridDim.x, (int)gridDim.y, (int)gridDim.z, (int)blockDim.x, (int)blockDim.y, (int)blockDim.z};
        for (int i = 0; i < 6; i++) out[i] = of[i];
    }
}

__global__ void wait_for(volatile int *flag) {
    while (*flag == 0) {
    }
}

__global__ void store_to(int *where) { *where = 1; }

__global__ void stop() { asm volatile("trap;"); }
}
