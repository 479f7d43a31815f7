// A libnvidia-ml.so.1 as a machine has it, for the daemon's tests: one GPU, of the UUID that the fake worker names.
#include <nvml.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int gpu;

nvmlReturn_t nvmlInit_v2(void) { return geteuid() == 0 ? NVML_ERROR_NO_PERMISSION : NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    *device = (nvmlDevice_t)&gpu;
    return strcmp(uuid, "GPU-01010101-0101-0101-0101-010101010101") == 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

static int is_gpu(nvmlDevice_t device) { return device == (nvmlDevice_t)&gpu; }

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    snprintf(version, length, "580.1");
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    *minor = 7;
    return is_gpu(device) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    if (!is_gpu(device) || memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = 1000, memory->reserved = 100, memory->free = 600, memory->used = 300;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power) {
    *power = 123456;
    return is_gpu(device) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length) {
    snprintf(version, length, "96.00");
    return is_gpu(device) && length == 32 ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

// As NVML does for each value: it has its own result.
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    for (int i = 0; i < count; i++) {
        values[i].nvmlReturn = NVML_SUCCESS;
        values[i].value.uiVal = values[i].fieldId + 1;
    }
    return is_gpu(device) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

// The process hangs, or ends.
nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length) {
    (void)device, (void)serial, (void)length;
    _exit(1);
}
