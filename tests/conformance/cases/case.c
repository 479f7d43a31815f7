// What all cases share: finding calls, printing answers, a process for each group.
//
//   PROGRAM            every group in a process of its own, one after the other
//   PROGRAM GROUP      that group, in this process
//   PROGRAM --list     the groups
#include "case.h"

#include <errno.h>
#include <signal.h>

struct group groups[64];
int group_count;
CUdevice device;
CUcontext context;
CUmodule module;

#define EMBED(name, file)                                                                                              \
    __asm__(".section .rodata\n.balign 16\n.global " name "\n" name ":\n.incbin \"" file "\"\n.byte 0\n.global " name   \
            "_end\n" name "_end:\n.previous\n")
EMBED("code_fatbin", CODE ".fatbin");
EMBED("code_ptx", CODE ".ptx");

// Not cuGetErrorName: that is tested here, too.
static const struct {
    CUresult result;
    const char *name;
} names[] = {
#define NAME(code) {code, #code}
#include "names.h"
#undef NAME
};

const char *code_name(CUresult result) {
    if (result == CUDA_SUCCESS) return "SUCCESS";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].result == result) return names[i].name;
    static char number[32];
    snprintf(number, sizeof number, "code %d", result);
    return number;
}

void group_add(const char *name, group_function *run) {
    if (group_count == sizeof groups / sizeof *groups) abort();
    groups[group_count++] = (struct group){name, run};
}

void *symbol(const char *name) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    void *found = dlsym(library, name);
    if (!found) {
        printf("%s: not exported\n", name);
        exit(3);
    }
    return found;
}

CUresult answer(const char *call, const char *what, CUresult result) {
    printf("%s, %s: %s\n", call, what, code_name(result));
    return result;
}

void set(const char *call, CUresult result) {
    if (result == CUDA_SUCCESS) return;
    printf("%s, which cases after it need: %s\n", call, code_name(result));
    exit(3);
}

void with_driver(void) {
    SET(cuInit, 0);
    SET(cuDeviceGet, &device, 0);
}

void with_context(void) {
    with_driver();
    SET(cuCtxCreate_v2, &context, 0, device);
}

void with_module(void) {
    with_context();
    SET(cuModuleLoadData, &module, code_ptx);
}

void no_context(void) {
    CUcontext left = NULL;
    do {
        SET(cuCtxSetCurrent, NULL);
        SET(cuCtxGetCurrent, &left);
    } while (left);
}

CUfunction function(const char *name) {
    CUfunction found;
    SET(cuModuleGetFunction, &found, module, name);
    return found;
}

static void refill(CUdeviceptr memory, size_t bytes) {
    unsigned char *content = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) content[i] = (unsigned char)i;
    SET(cuMemcpyHtoD_v2, memory, content, bytes);
    // It may arrive after the call: streams that wait for no other must see it too.
    SET(cuCtxSynchronize, );
    free(content);
}

CUdeviceptr device_bytes(size_t bytes) {
    CUdeviceptr memory;
    SET(cuMemAlloc_v2, &memory, bytes);
    refill(memory, bytes);
    return memory;
}

int holds(CUdeviceptr memory, const void *content, size_t bytes) {
    unsigned char *found = malloc(bytes);
    SET(cuCtxSynchronize, );
    SET(cuMemcpyDtoH_v2, found, memory, bytes);
    int same = memcmp(found, content, bytes) == 0;
    free(found);
    refill(memory, bytes);
    return same;
}

int word_at(CUdeviceptr memory) {
    int word;
    SET(cuCtxSynchronize, );
    SET(cuMemcpyDtoH_v2, &word, memory, sizeof word);
    return word;
}

struct busy hold(CUstream stream) {
    struct busy busy = {.stream = stream};
    SET(cuMemHostAlloc, (void **)&busy.flag, sizeof(int), 0);
    *busy.flag = 0;
    void *parameters[] = {&busy.flag};
    SET(cuLaunchKernel, function("wait_for"), 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
    return busy;
}

void release(struct busy *busy) {
    __atomic_store_n(busy->flag, 1, __ATOMIC_SEQ_CST);
    SET(cuStreamSynchronize, busy->stream);
    SET(cuMemFreeHost, busy->flag);
}

static int in_own_process(const char *program, const struct group *group) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", program, group->name, NULL);
        _exit(127);
    }
    int status = 0;
    while (child < 0 || waitpid(child, &status, 0) < 0) {
        if (child < 0 || errno != EINTR) {
            perror(program);
            exit(3);
        }
    }
    if (WIFSIGNALED(status)) printf("group %s: ended by signal %d\n", group->name, WTERMSIG(status));
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    int good = 1, known = 0;
    for (int i = 0; i < group_count; i++) {
        if (count == 1) {
            good &= in_own_process(arguments[0], &groups[i]);
        } else if (strcmp(arguments[1], "--list") == 0) {
            puts(groups[i].name);
            known = 1;
        } else if (strcmp(arguments[1], groups[i].name) == 0) {
            alarm(120);
            groups[i].run();
            return 0;
        }
    }
    if (count > 1 && !known) {
        fprintf(stderr, "no group %s\n", arguments[1]);
        return 2;
    }
    return good ? 0 : 1;
}
