// Modules: loaded from every form of code, their functions and globals.
#include "case.h"

// A file with code in it.
static const char *file_of(const char *content, size_t size, char *name) {
    int file = mkstemp(name);
    if (file < 0 || write(file, content, size) != (ssize_t)size) exit(3);
    close(file);
    return name;
}

GROUP(loaded) {
    with_context();
    CUmodule loaded = NULL;
    TRY("PTX", cuModuleLoadData, &loaded, code_ptx);
    TRY("one", cuModuleUnload, loaded);
    TRY("a fat binary", cuModuleLoadData, &loaded, code_fatbin);
    TRY("a fat binary", cuModuleLoadFatBinary, &loaded, code_fatbin);
    TRY("text that is no code", cuModuleLoadData, &loaded, "this is no PTX at all");
    TRY("null", cuModuleLoadData, &loaded, NULL);
    TRY("null", cuModuleLoadFatBinary, &loaded, NULL);
    TRY("PTX without options", cuModuleLoadDataEx, &loaded, code_ptx, 0, NULL, NULL);
    char log[256] = "";
    CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)sizeof log};
    TRY("PTX with a place for messages", cuModuleLoadDataEx, &loaded, code_ptx, 2, options, values);
    TRY("null", cuModuleLoadDataEx, &loaded, NULL, 0, NULL, NULL);
    TRY("PTX that does not parse", cuModuleLoadDataEx, &loaded,
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry broken() { nonsense; }\n", 0, NULL, NULL);
    TRY("PTX that does not parse", cuModuleLoadData, &loaded,
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry broken() { nonsense; }\n");
    TRY("PTX of a version to come", cuModuleLoadData, &loaded,
        ".version 99.0\n.target sm_70\n.address_size 64\n.visible .entry later() { ret; }\n");
    char ptx[] = "/tmp/conformance-XXXXXX", nothing[] = "/tmp/conformance-XXXXXX";
    TRY("a file of PTX", cuModuleLoad, &loaded, file_of(code_ptx, code_ptx_end - code_ptx - 1, ptx));
    TRY("a file that is not there", cuModuleLoad, &loaded, "/nonexistent/file.ptx");
    TRY("an empty file", cuModuleLoad, &loaded, file_of("", 0, nothing));
    TRY("null", cuModuleLoad, &loaded, NULL);
    unlink(ptx);
    unlink(nothing);
    TRY("null", cuModuleUnload, NULL);
    CUmoduleLoadingMode mode = 99;
    TRY("of this process", cuModuleGetLoadingMode, &mode);
    TELL(cuModuleGetLoadingMode, "of this process, is", "%d", mode);
    no_context();
    TRY("without a context", cuModuleLoadData, &loaded, code_ptx);
    TRY("without a context", cuModuleLoadFatBinary, &loaded, code_fatbin);
    TRY("without a context", cuModuleLoadDataEx, &loaded, code_ptx, 0, NULL, NULL);
}

GROUP(functions) {
    with_module();
    CUfunction found = NULL, again = NULL;
    TRY("one", cuModuleGetFunction, &found, module, "add");
    TRY("one again", cuModuleGetFunction, &again, module, "add");
    YES(cuModuleGetFunction, "one again, is the same", found == again);
    TRY("that is not there", cuModuleGetFunction, &again, module, "missing");
    TRY("of an empty name", cuModuleGetFunction, &again, module, "");
    TRY("of a null name", cuModuleGetFunction, &again, module, NULL);
    TRY("to null", cuModuleGetFunction, NULL, module, "add");
    TRY("of null", cuModuleGetFunction, &again, NULL, "add");
    TRY("of a variable", cuModuleGetFunction, &again, module, "number");
    unsigned count = 0;
    TRY("of the module", cuModuleGetFunctionCount, &count, module);
    TELL(cuModuleGetFunctionCount, "of the module, is", "%u", count);
    TRY("to null", cuModuleGetFunctionCount, NULL, module);
    TRY("of null", cuModuleGetFunctionCount, &count, NULL);
    CUfunction all[32] = {0};
    TRY("all", cuModuleEnumerateFunctions, all, count, module);
    int own = 0;
    for (unsigned i = 0; i < count; i++) {
        CUmodule of = NULL;
        if (CU(cuFuncGetModule)(&of, all[i]) == CUDA_SUCCESS && of == module) own++;
    }
    YES(cuModuleEnumerateFunctions, "all, each of this module", own == (int)count);
    TRY("two", cuModuleEnumerateFunctions, all, 2, module);
    TRY("to null", cuModuleEnumerateFunctions, NULL, count, module);
    TRY("of null", cuModuleEnumerateFunctions, all, count, NULL);
    CUmodule of = NULL;
    TRY("of one", cuFuncGetModule, &of, found);
    YES(cuFuncGetModule, "of one, is its", of == module);
    TRY("of null", cuFuncGetModule, &of, NULL);
    TRY("to null", cuFuncGetModule, NULL, found);
    const char *name = NULL;
    TRY("of one", cuFuncGetName, &name, found);
    TELL(cuFuncGetName, "of one, is", "%s", name ? name : "null");
    TRY("of null", cuFuncGetName, &name, NULL);
    TRY("to null", cuFuncGetName, NULL, found);
}

GROUP(globals) {
    with_module();
    CUdeviceptr where = 0, again = 0;
    size_t size = 0;
    TRY("a number", cuModuleGetGlobal_v2, &where, &size, module, "number");
    TELL(cuModuleGetGlobal_v2, "a number, is", "%zu bytes, %d", size, word_at(where));
    TRY("a number again", cuModuleGetGlobal_v2, &again, NULL, module, "number");
    YES(cuModuleGetGlobal_v2, "a number again, is there", where == again);
    TRY("a table", cuModuleGetGlobal_v2, NULL, &size, module, "table");
    TELL(cuModuleGetGlobal_v2, "a table, is", "%zu bytes", size);
    TRY("constants", cuModuleGetGlobal_v2, &where, &size, module, "factors");
    TRY("that is not there", cuModuleGetGlobal_v2, &where, &size, module, "missing");
    TRY("of a null name", cuModuleGetGlobal_v2, &where, &size, module, NULL);
    TRY("of null", cuModuleGetGlobal_v2, &where, &size, NULL, "number");
    TRY("a kernel", cuModuleGetGlobal_v2, &where, &size, module, "add");
    CUmodule other;
    SET(cuModuleLoadData, &other, code_ptx);
    SET(cuModuleGetGlobal_v2, &again, NULL, other, "factors");
    YES(cuModuleGetGlobal_v2, "of another module of the same code, is elsewhere", where != again);
}

GROUP(parameters) {
    with_module();
    CUfunction mixed = function("mixed"), nothing = function("nothing");
    size_t offset = 0, size = 0;
    for (size_t i = 0; i < 6; i++) {
        char what[32];
        snprintf(what, sizeof what, "number %zu of five", i);
        CUresult result = CU(cuFuncGetParamInfo)(mixed, i, &offset, &size);
        TELL(cuFuncGetParamInfo, what, "%s at %zu, %zu bytes", code_name(result), result ? 0 : offset, result ? 0 : size);
    }
    TRY("with a null size", cuFuncGetParamInfo, mixed, 1, &offset, NULL);
    TRY("to null", cuFuncGetParamInfo, mixed, 1, NULL, &size);
    TRY("of a kernel without", cuFuncGetParamInfo, nothing, 0, &offset, &size);
    TRY("of null", cuFuncGetParamInfo, NULL, 0, &offset, &size);
}
