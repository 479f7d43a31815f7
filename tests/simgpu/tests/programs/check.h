// Checks that end a program with a message.
#pragma once
#include <cstdio>
#include <cstdlib>

#include <cuda.h>
#include <cuda_runtime.h>

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fflush(stdout);                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                              \
            _Exit(4);                                                                                                  \
        }                                                                                                              \
    } while (0)

// A call and the result it must have.
#define EXPECT(call, expected)                                                                                         \
    do {                                                                                                               \
        int expect_result = (int)(call);                                                                               \
        if (expect_result != (int)(expected)) {                                                                        \
            fflush(stdout);                                                                                            \
            fprintf(stderr, "%s:%d: %s is %d, not %d\n", __FILE__, __LINE__, #call, expect_result, (int)(expected));   \
            _Exit(3);                                                                                                  \
        }                                                                                                              \
    } while (0)

#define OK(call) EXPECT(call, 0)
