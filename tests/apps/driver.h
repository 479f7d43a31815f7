// The driver's own interface for programs that use it: libcuda.so.1 opened by hand, functions found by name.
#pragma once

#include "app.h"

// The deprecated functions too.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#include <cuda.h>
#include <dlfcn.h>

inline void *driver_function(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "libcuda.so.1 has no %s\n", name);
        exit(3);
    }
    return found;
}

#define DRIVER_NAME_(function) #function
#define DRIVER_NAME(function) DRIVER_NAME_(function)

// ASK(cuMemAlloc, &p, n): what the function answers, under the name that cuda.h gives it now (cuMemAlloc_v2, ...).
#define ASK(function, ...)                                                                                             \
    ([&] {                                                                                                             \
        static auto found = (decltype(&function))driver_function(DRIVER_NAME(function));                               \
        return found(__VA_ARGS__);                                                                                     \
    }())

// CU(cuMemAlloc, &p, n): calls it and ends the program if it fails.
#define CU(function, ...)                                                                                              \
    do {                                                                                                               \
        CUresult cu_result = ASK(function, __VA_ARGS__);                                                               \
        if (cu_result != CUDA_SUCCESS) {                                                                               \
            const char *cu_name = "?";                                                                                 \
            ASK(cuGetErrorName, cu_result, &cu_name);                                                                  \
            fflush(stdout);                                                                                            \
            fprintf(stderr, "%s:%d: %s: %s (%d)\n", __FILE__, __LINE__, #function, cu_name, (int)cu_result);           \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

// FAILS(code, cuMemAlloc, &p, 0): that it answers this and nothing else.
#define FAILS(code, function, ...)                                                                                     \
    do {                                                                                                               \
        CUresult cu_result = ASK(function, __VA_ARGS__);                                                               \
        if (cu_result != (code)) {                                                                                     \
            fflush(stdout);                                                                                            \
            fprintf(stderr, "%s:%d: %s: %d instead of %s\n", __FILE__, __LINE__, #function, (int)cu_result, #code);    \
            exit(4);                                                                                                   \
        }                                                                                                              \
    } while (0)
