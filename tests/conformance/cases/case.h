// Cases of the driver interface: calls by their exported names, a line of answer for each.
//
//   GROUP(name) { ... }                cases that share a process; each group has one of its own
//   TRY(what, call, ARGUMENT...)       calls, and prints `call, what: ANSWER`; its value is the CUresult
//   TRY_PTSZ, TRY_PTDS                 the same of the call and of its form for per-thread default streams
//   TELL(call, what, format, ...)      prints `call, what: ` and a value
//   SET(call, ARGUMENT...)             what a case needs first: ends the group if it fails
//
// Answers never hold an address, a handle or anything that differs from one GPU to another: relations are told instead.
// Handles that are not handles are null: the driver looks into others without asking.
#ifndef CASE_H
#define CASE_H

#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL // every version of every call
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// In cudaProfiler.h, which not every toolkit has.
#ifndef __cuda_cuda_profiler_h__
CUresult cuProfilerInitialize(const char *, const char *, int);
CUresult cuProfilerStart(void);
CUresult cuProfilerStop(void);
#endif

typedef void group_function(void);
struct group {
    const char *name;
    group_function *run;
};
extern struct group groups[];
extern int group_count;
void group_add(const char *name, group_function *run);

#define GROUP(name)                                                                                                    \
    static void group_##name(void);                                                                                    \
    __attribute__((constructor)) static void add_##name(void) { group_add(#name, group_##name); }                      \
    static void group_##name(void)

// The driver's function of that name, as the dynamic linker finds it.
void *symbol(const char *name);
#define CU(call) ((__typeof__(&call))symbol(#call))

CUresult answer(const char *call, const char *what, CUresult result);
const char *code_name(CUresult result);
void set(const char *call, CUresult result);

#define TRY(what, call, ...) answer(#call, what, CU(call)(__VA_ARGS__))
#define TRY_PTSZ(what, call, ...) (TRY(what, call, __VA_ARGS__), TRY(what, call##_ptsz, __VA_ARGS__))
#define TRY_PTDS(what, call, ...) (TRY(what, call, __VA_ARGS__), TRY(what, call##_ptds, __VA_ARGS__))
#define SET(call, ...) set(#call, CU(call)(__VA_ARGS__))
#define TELL(call, what, format, ...) ((void)sizeof(&call), printf("%s, %s: " format "\n", #call, what, __VA_ARGS__))
#define YES(call, what, condition) TELL(call, what, "%s", (condition) ? "yes" : "no")

// Device 0, a context of it that is current, and the code of code.cu in it.
extern CUdevice device;
extern CUcontext context;
extern CUmodule module;
void with_driver(void);  // cuInit
void with_context(void); // and a context
void with_module(void);  // and the module
void no_context(void);   // leaves the thread without a current one
CUfunction function(const char *name);

// Images of code.cu: a fat binary, and PTX as text with a NUL behind it.
extern const char code_fatbin[], code_fatbin_end[], code_ptx[], code_ptx_end[];

// Device memory, filled with bytes 0, 1, 2, ...
CUdeviceptr device_bytes(size_t bytes);
// Whether device memory has this content, and puts 0, 1, 2, ... there again.
int holds(CUdeviceptr memory, const void *content, size_t bytes);
// A word of device memory.
int word_at(CUdeviceptr memory);
// A stream that is busy until `release`d.
struct busy {
    int *flag;
    CUstream stream;
};
struct busy hold(CUstream stream);
void release(struct busy *busy);

#endif
