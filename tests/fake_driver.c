/* A driver of NVIDIA's for tests of a CUDA build of torch on a machine without one.

As libcuda.so.1 it is asked by CUDA's runtime whether it is new enough, and whether it can start:
FAKE_VERSION and FAKE_INIT are the answers. Preloaded, it also answers in place of the runtime what
torch asks about GPUs: there are FAKE_GPUS, each with a UUID. Nothing can be computed on them.
With FAKE_LOG, each process that starts CUDA adds a line to that file. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int number(const char *name, int fallback) {
  const char *text = getenv(name);
  return text ? atoi(text) : fallback;
}

static int succeed(void) { return 0; }

/* libcuda.so.1 */

int cuDriverGetVersion(int *version) {
  *version = number("FAKE_VERSION", 99000);
  return 0;
}

int cuInit(unsigned flags) {
  const char *path = getenv("FAKE_LOG");
  FILE *log = path ? fopen(path, "a") : NULL;
  if (log) {
    fprintf(log, "started\n");
    fclose(log);
  }
  return number("FAKE_INIT", 100); /* CUDA_ERROR_NO_DEVICE */
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = *active = 0;
  return 0;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long flags,
                        int *status) {
  *function = (void *)succeed;
  if (!strcmp(symbol, "cuDriverGetVersion")) *function = (void *)cuDriverGetVersion;
  if (!strcmp(symbol, "cuInit")) *function = (void *)cuInit;
  if (!strcmp(symbol, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
  if (status) *status = 0;
  return 0;
}

int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* libcudart, if this is preloaded */

static int current;

int cudaGetDeviceCount(int *count) {
  *count = number("FAKE_GPUS", 0);
  return 0;
}

int cudaGetDevice(int *device) {
  *device = current;
  return 0;
}

int cudaSetDevice(int device) {
  current = device;
  return 0;
}

int cudaGetDeviceProperties(char *properties, int device) {
  memset(properties, 0, 400);
  snprintf(properties, 256, "fake %d", device);
  memset(properties + 256, device + 1, 16);          /* uuid */
  *(size_t *)(properties + 288) = (size_t)1 << 34;   /* totalGlobalMem */
  *(int *)(properties + 360) = 9;                    /* major */
  return 0;
}

int cudaGetDeviceProperties_v2(char *properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
