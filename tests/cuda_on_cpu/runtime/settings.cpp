// The environment variables, read when the runtime is first used.
#include "internal.h"

namespace cuda_on_cpu {

static void bad_setting(const char *name, const char *value, const char *allowed) {
    fprintf(stderr, "cuda_on_cpu: %s is '%s'; it may be %s\n", name, value, allowed);
    abort();
}

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *value = getenv(name);
    if (!value || !*value) return otherwise;
    char *end;
    const uint64_t result = strtoull(value, &end, 10);
    if (*end) bad_setting(name, value, "a number");
    return result;
}

// The index of the variable's value in a list of three words; 0 if it is not set.
static int choice(const char *name, const char *zero, const char *one, const char *two) {
    const char *value = getenv(name);
    if (!value || !*value || !strcmp(value, zero)) return 0;
    if (!strcmp(value, one)) return 1;
    if (two && !strcmp(value, two)) return 2;
    char allowed[100];
    snprintf(allowed, sizeof allowed, "%s, %s%s%s", zero, one, two ? ", " : "", two ? two : "");
    bad_setting(name, value, allowed);
    return 0;
}

bool known_arch(int arch) {
    return arch == 70 || arch == 75 || arch == 80 || arch == 86 || arch == 89 || arch == 90;
}

static Settings read_settings() {
    static const cudaError_t kernel_errors[] = {cudaSuccess, cudaErrorNoKernelImageForDevice,
                                                cudaErrorInvalidDeviceFunction};
    Settings s = {};
    s.seed = number("CUDA_ON_CPU_SEED", 0);
    s.fragment_key = number("CUDA_ON_CPU_FRAGMENTS", 0);
    s.schedule = choice("CUDA_ON_CPU_SCHEDULE", "shuffled", "greedy", nullptr) == 1
                     ? Schedule::greedy
                     : Schedule::shuffled;
    s.eager_streams = choice("CUDA_ON_CPU_STREAMS", "lazy", "eager", nullptr) == 1;
    s.guard = number("CUDA_ON_CPU_GUARD", 1) != 0;
    s.memory = number("CUDA_ON_CPU_MEMORY", 4ull << 30);
    s.arch = static_cast<int>(number("CUDA_ON_CPU_ARCH", 80));
    s.devices = static_cast<int>(number("CUDA_ON_CPU_DEVICES", 1));
    s.old_driver = choice("CUDA_ON_CPU_DRIVER", "new", "old", nullptr) == 1;
    s.kernel_error =
        kernel_errors[choice("CUDA_ON_CPU_KERNELS", "present", "wrong_architecture", "missing")];
    if (!known_arch(s.arch))
        bad_setting("CUDA_ON_CPU_ARCH", getenv("CUDA_ON_CPU_ARCH"), "70, 75, 80, 86, 89 or 90");
    if (s.devices < 0 || s.devices > MAX_DEVICES)
        bad_setting("CUDA_ON_CPU_DEVICES", getenv("CUDA_ON_CPU_DEVICES"), "0 to 8");
    return s;
}

Settings &settings() {
    static Settings values = read_settings();
    return values;
}

} // namespace cuda_on_cpu
