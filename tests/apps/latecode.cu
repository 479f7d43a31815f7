// Code that is loaded while the program runs, with variables that take several of the driver's blocks, behind the first launch of a
// kernel that may print: for that the driver takes room among the addresses of code. The variables' addresses are kept in device memory.
//
//   latecode [--modules N] [--kib N] [--print 0|1] [--iterations N] [--sleep-us N] [--progress FILE]      12, 600, 1, 40, 0, none
//
// Loads a module in each of the first iterations. Prints "value V". FILE holds the iterations done.
#include "driver.h"

static const char TEXT[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .b8 room[%zu];
.visible .entry keep(.param .u64 to)
{
    .reg .b64 %%rd<4>;
    ld.param.u64 %%rd1, [to];
    cvta.to.global.u64 %%rd2, %%rd1;
    mov.u64 %%rd3, room;
    st.global.u64 [%%rd2], %%rd3;
    ret;
}
)";

// Prints a line if it is told to, which it never is.
static const char PRINTS[] = R"(
.version 7.0
.target sm_75
.address_size 64
.extern .func (.param .b32 written) vprintf(.param .b64 format, .param .b64 values);
.global .align 1 .b8 line[2] = {10, 0};
.visible .entry complain(.param .u32 wanted)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    ld.param.u32 %r1, [wanted];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mov.u64 %rd1, line;
    cvta.global.u64 %rd2, %rd1;
    mov.u64 %rd3, 0;
    {
        .param .b64 format;
        st.param.b64 [format+0], %rd2;
        .param .b64 values;
        st.param.b64 [values+0], %rd3;
        .param .b32 written;
        call.uni (written), vprintf, (format, values);
        ld.param.b32 %r2, [written+0];
    }
DONE:
    ret;
}
)";

// Changes the first word of each room through the addresses that are kept.
__global__ void step(uint32_t *value, uint64_t *kept, uint32_t count, uint32_t round) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t *room = (uint32_t *)kept[i];
        room[0] = room[0] * 31 + round + i;
        *value = (*value ^ room[0]) * 0x2c1b3c6du;
    }
}

static void launch(const char *text, const char *name, void *parameter) {
    CUmodule module;
    CUfunction function;
    CU(cuModuleLoadData, &module, text);
    CU(cuModuleGetFunction, &function, module, name);
    CU(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, nullptr, &parameter, nullptr);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t modules = options.number("--modules", 12);
    const uint64_t kib = options.number("--kib", 600);
    const bool prints = options.number("--print", 1) != 0;
    const uint64_t iterations = options.number("--iterations", 40);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    uint32_t *value;
    uint64_t *kept;
    CHECK(cudaMalloc(&value, 4));
    CHECK(cudaMalloc(&kept, 8 * modules));
    CHECK(cudaMemset(value, 1, 4));
    if (prints) {
        uint32_t wanted = 0;
        launch(PRINTS, "complain", &wanted);
    }
    uint32_t count = 0;
    for (uint64_t i = 0; i < iterations; i++) {
        if (count < modules) {
            char text[2048];
            snprintf(text, sizeof text, TEXT, (size_t)kib << 10);
            uint64_t *to = kept + count++;
            launch(text, "keep", &to);
        }
        step<<<1, 1>>>(value, kept, count, (uint32_t)i);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        progress(file, i + 1);
        sleep_us(sleep);
    }
    uint32_t last;
    CHECK(cudaMemcpy(&last, value, 4, cudaMemcpyDeviceToHost));
    printf("value %u\n", last);
    return 0;
}
