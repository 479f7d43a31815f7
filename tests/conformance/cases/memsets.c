// Memsets of one and two dimensions.
#include "case.h"

static unsigned char want[4096];

// Bytes 0, 1, 2, ..., as device_bytes fills them.
static void numbered(void) {
    for (int i = 0; i < 4096; i++) want[i] = (unsigned char)i;
}

static void rows(int pitch, int height, const void *value, int size, int width) {
    numbered();
    for (int row = 0; row < height; row++)
        for (int i = 0; i < width; i++) memcpy(want + row * pitch + i * size, value, size);
}

GROUP(lines) {
    with_context();
    CUdeviceptr memory = device_bytes(4096);
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    unsigned char byte = 0xab;
    unsigned short half = 0xabcd;
    unsigned word = 0x12345678;
#define LINE(call, value)                                                                                              \
    do {                                                                                                               \
        rows(0, 1, &value, sizeof value, 99);                                                                          \
        TRY("99 of them", call##_v2, memory, value, 99);                                                               \
        YES(call##_v2, "99 of them, no more", holds(memory, want, 4096));                                              \
        TRY("99 of them", call##_v2_ptds, memory, value, 99);                                                          \
        YES(call##_v2_ptds, "99 of them, no more", holds(memory, want, 4096));                                         \
        TRY("99 of them", call##Async, memory, value, 99, stream);                                                     \
        YES(call##Async, "99 of them, no more", holds(memory, want, 4096));                                            \
        TRY("99 of them", call##Async_ptsz, memory, value, 99, stream);                                                \
        YES(call##Async_ptsz, "99 of them, no more", holds(memory, want, 4096));                                       \
        TRY("none", call##_v2, memory, value, 0);                                                                      \
        TRY("none", call##Async, memory, value, 0, stream);                                                            \
        TRY("at null", call##_v2, 0, value, 99);                                                                       \
        TRY("at null", call##_v2_ptds, 0, value, 99);                                                                  \
        TRY("at null", call##Async, 0, value, 99, stream);                                                             \
        TRY("at null", call##Async_ptsz, 0, value, 99, stream);                                                        \
        TRY("beyond the end", call##_v2, memory, value, (size_t)1 << 40);                                              \
        TRY("beyond the end", call##Async, memory, value, (size_t)1 << 40, stream);                                    \
    } while (0)
    LINE(cuMemsetD8, byte);
    LINE(cuMemsetD16, half);
    LINE(cuMemsetD32, word);
    TRY("at an odd address", cuMemsetD16_v2, memory + 1, half, 4);
    TRY("at an odd address", cuMemsetD32_v2, memory + 2, word, 4);
    TRY("at an odd address", cuMemsetD16Async, memory + 1, half, 4, stream);
    TRY("at an odd address", cuMemsetD32Async, memory + 2, word, 4, stream);
    CUdeviceptr freed = device_bytes(64);
    SET(cuMemFree_v2, freed);
    TRY("of freed memory", cuMemsetD8_v2, freed, 1, 64);
    no_context();
    TRY("without a context", cuMemsetD8_v2, memory, 1, 64);
    TRY("without a context", cuMemsetD16_v2, memory, 1, 64);
    TRY("without a context", cuMemsetD32_v2, memory, 1, 64);
    TRY("without a context", cuMemsetD8Async, memory, 1, 64, NULL);
}

GROUP(planes) {
    with_context();
    CUdeviceptr memory = device_bytes(4096);
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    unsigned char byte = 0xab;
    unsigned short half = 0xabcd;
    unsigned word = 0x12345678;
#define PLANE(call, value)                                                                                             \
    do {                                                                                                               \
        rows(512, 5, &value, sizeof value, 33);                                                                        \
        TRY("33 by 5", call##_v2, memory, 512, value, 33, 5);                                                          \
        YES(call##_v2, "33 by 5, no more", holds(memory, want, 4096));                                                 \
        TRY("33 by 5", call##_v2_ptds, memory, 512, value, 33, 5);                                                     \
        YES(call##_v2_ptds, "33 by 5, no more", holds(memory, want, 4096));                                            \
        TRY("33 by 5", call##Async, memory, 512, value, 33, 5, stream);                                                \
        YES(call##Async, "33 by 5, no more", holds(memory, want, 4096));                                               \
        TRY("33 by 5", call##Async_ptsz, memory, 512, value, 33, 5, stream);                                           \
        YES(call##Async_ptsz, "33 by 5, no more", holds(memory, want, 4096));                                          \
        TRY("0 by 5", call##_v2, memory, 512, value, 0, 5);                                                            \
        TRY("33 by 0", call##Async, memory, 512, value, 33, 0, stream);                                                \
        TRY("at null", call##_v2, 0, 512, value, 33, 5);                                                               \
        TRY("at null", call##_v2_ptds, 0, 512, value, 33, 5);                                                          \
        TRY("at null", call##Async, 0, 512, value, 33, 5, stream);                                                     \
        TRY("at null", call##Async_ptsz, 0, 512, value, 33, 5, stream);                                                \
    } while (0)
    PLANE(cuMemsetD2D8, byte);
    PLANE(cuMemsetD2D16, half);
    PLANE(cuMemsetD2D32, word);
}
