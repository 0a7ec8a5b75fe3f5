/*
 * A libnvidia-ml.so.1 without a GPU: it answers from a profile and fails where it is told to.
 *
 * Specification: NVML API reference (nvml.h): names, argument order, structure layouts and return codes.
 *
 * FAKE_NVML_PROFILE names a text file, one answer a line: SYMBOL <tab> ARGUMENTS <tab> ANSWER. SYMBOL has no _v2 suffix;
 * ARGUMENTS are "gpu0,3"; ANSWER is numbers with spaces between, a text that starts with ", or !CODE for an error.
 * What the file does not answer is NVML_ERROR_NOT_SUPPORTED.
 *
 * FAKE_NVML_INJECT is a list "SYMBOL=KIND" or "SYMBOL@gpu3=KIND", divided by semicolons; SYMBOL "*" is every device
 * call. KIND is not_supported, no_permission, gpu_lost, timeout, driver_not_loaded, unknown, hang, crash, garbage
 * (success, and nonsense in every byte of the answer), noise (prints on stdout, then answers), code:N (return code N) or
 * delay:MS (answers after so many milliseconds). "@FILE" instead of the list is a file with it, so that a GPU may fail
 * between two scans.
 */
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int ret;
typedef struct device { u32 index; u32 mig; } *device; /* mig: 0 is the GPU, n + 1 its slice n */

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
enum { GPUS_MAX = 64, SLICES_MAX = 8, BUCKETS = 8192 };

struct entry { char *key; char *value; struct entry *next; };
struct answer { ret code; int garbage; const char *value; };

static struct entry *table[BUCKETS];
static struct device devices[GPUS_MAX];
static struct device slices[GPUS_MAX][SLICES_MAX];
static u32 device_count;
static int initialised;

static const struct { const char *name; ret code; } kinds[] = {
    {"not_supported", 3}, {"no_permission", 4}, {"driver_not_loaded", 9}, {"timeout", 10},
    {"gpu_lost", 15},     {"unknown", 999},
};

static u32 hash(const char *text)
{
    u32 h = 5381;
    while (*text)
        h = h * 33 + (unsigned char)*text++;
    return h % BUCKETS;
}

static void load(void)
{
    const char *path = getenv("FAKE_NVML_PROFILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char *line = NULL;
    size_t room = 0;
    ssize_t length;

    while (file && (length = getline(&line, &room, file)) > 0) {
        if (line[length - 1] == '\n')
            line[--length] = 0;
        char *first = strchr(line, '\t');
        char *second = first ? strchr(first + 1, '\t') : NULL;
        if (!second)
            continue;
        *second = 0;
        struct entry *entry = malloc(sizeof *entry);
        entry->key = strdup(line);
        entry->value = strdup(second + 1);
        u32 bucket = hash(entry->key);
        entry->next = table[bucket];
        table[bucket] = entry;
    }
    free(line);
    if (file)
        fclose(file);
}

/* The list of failures; one in a file is read again with every count of the GPUs, which begins a scan. */
static const char *wanted(const char *symbol)
{
    static char list[512];
    const char *value = getenv("FAKE_NVML_INJECT");

    if (!value || *value != '@')
        return value;
    if (!strcmp(symbol, "nvmlDeviceGetCount")) {
        FILE *file = fopen(value + 1, "r");
        list[file ? fread(list, 1, sizeof list - 1, file) : 0] = 0;
        if (file)
            fclose(file);
    }
    return list;
}

/* The kind of failure that is asked for this symbol on this GPU (-1: none); NULL where there is none. */
static const char *injected(const char *symbol, int gpu)
{
    static char kind[32];
    const char *list = wanted(symbol);
    char where[96];

    while (list && *list) {
        const char *equals = strchr(list, '='), *end = strchr(list, ';');
        if (!equals)
            return NULL;
        if (!end)
            end = list + strlen(list);
        size_t name = (size_t)(equals - list), size = (size_t)(end - equals - 1);
        for (int form = 0; form < 4; form++) {
            const char *what = form & 1 ? symbol : "*";
            if (form & 2)
                snprintf(where, sizeof where, "%s", what);
            else
                snprintf(where, sizeof where, "%s@gpu%d", what, gpu);
            if (strlen(where) == name && !strncmp(where, list, name) && (gpu >= 0 || strcmp(what, "*"))) {
                snprintf(kind, sizeof kind, "%.*s", (int)size, equals + 1);
                return kind;
            }
        }
        list = *end ? end + 1 : end;
    }
    return NULL;
}

/* Acts on an injected failure; returns 1 where `answer` already holds the outcome. */
static int inject(struct answer *answer, const char *symbol, int gpu)
{
    const char *kind = injected(symbol, gpu);

    if (!kind)
        return 0;
    if (!strcmp(kind, "hang"))
        for (;;)
            pause();
    if (!strcmp(kind, "crash")) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if (!strcmp(kind, "noise")) {
        printf("NVML: %s was called\n", symbol);
        fflush(stdout);
        return 0;
    }
    if (!strcmp(kind, "garbage")) {
        *answer = (struct answer){OK, 1, "0"};
        return 1;
    }
    if (!strncmp(kind, "delay:", 6)) {
        usleep(1000u * (u32)atoi(kind + 6));
        return 0;
    }
    if (!strncmp(kind, "code:", 5)) {
        *answer = (struct answer){atoi(kind + 5), 0, NULL};
        return 1;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kind, kinds[i].name)) {
            *answer = (struct answer){kinds[i].code, 0, NULL};
            return 1;
        }
    fprintf(stderr, "fake NVML: FAKE_NVML_INJECT names an unknown kind: %s\n", kind);
    abort();
}

/* The profile's answer; `arguments` is a printf format that follows "gpuN". */
static struct answer look(const char *symbol, device gpu, const char *arguments, ...)
{
    struct answer answer = {NOT_SUPPORTED, 0, NULL};
    char key[256];
    int used;
    va_list list;

    if (!initialised)
        return (struct answer){UNINITIALIZED, 0, NULL};
    if (inject(&answer, symbol, gpu ? (int)gpu->index : -1))
        return answer;
    used = gpu ? snprintf(key, sizeof key, "%s\tgpu%u", symbol, gpu->index) : snprintf(key, sizeof key, "%s\t", symbol);
    if (gpu && gpu->mig)
        used += snprintf(key + used, sizeof key - (size_t)used, "mig%u", gpu->mig - 1);
    va_start(list, arguments);
    vsnprintf(key + used, sizeof key - (size_t)used, arguments, list);
    va_end(list);
    for (struct entry *entry = table[hash(key)]; entry; entry = entry->next)
        if (!strcmp(entry->key, key)) {
            if (*entry->value == '!')
                return (struct answer){atoi(entry->value + 1), 0, NULL};
            return (struct answer){OK, 0, entry->value};
        }
    return answer;
}

static u64 next(struct answer *answer)
{
    char *end;
    if (answer->garbage)
        return 0xA5A5A5A5A5A5A5A5ull;
    u64 value = strtoull(answer->value, &end, 10);
    answer->value = end;
    return value;
}

static ret put_u32(struct answer a, u32 *out)
{
    if (a.code == OK)
        *out = (u32)next(&a);
    return a.code;
}

static ret put_u64(struct answer a, u64 *out)
{
    if (a.code == OK)
        *out = next(&a);
    return a.code;
}

static ret put_text(struct answer a, char *out, u32 room)
{
    if (a.code != OK)
        return a.code;
    if (a.garbage) {
        memset(out, 0xFE, room - 1);
        out[room - 1] = 0;
        return OK;
    }
    const char *text = a.value + (*a.value == '"');
    if (strlen(text) >= room)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

/* The library itself ---------------------------------------------------------------------------------------------- */

ret nvmlInitWithFlags(u32 flags)
{
    struct answer answer = {OK, 0, NULL};
    (void)flags;
    if (inject(&answer, "nvmlInit", -1) && answer.code != OK)
        return answer.code;
    if (!initialised)
        load();
    initialised = 1;
    return OK;
}

ret nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(ret code)
{
    static char text[32];
    snprintf(text, sizeof text, "error %d", code);
    return text;
}

ret nvmlSystemGetDriverVersion(char *out, u32 room)
{
    return put_text(look("nvmlSystemGetDriverVersion", NULL, ""), out, room);
}

ret nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    return put_u32(look("nvmlSystemGetCudaDriverVersion_v2", NULL, ""), (u32 *)out);
}

ret nvmlDeviceGetCount_v2(u32 *out)
{
    ret code = put_u32(look("nvmlDeviceGetCount", NULL, ""), out);
    device_count = code == OK && *out <= GPUS_MAX ? *out : 0;
    return code;
}

ret nvmlDeviceGetHandleByIndex_v2(u32 index, device *out)
{
    struct answer answer;
    if (!initialised)
        return UNINITIALIZED;
    if (index >= GPUS_MAX)
        return INVALID_ARGUMENT;
    if (inject(&answer, "nvmlDeviceGetHandleByIndex", (int)index) && answer.code != OK)
        return answer.code;
    devices[index].index = index;
    *out = &devices[index];
    return OK;
}

/* Calls of one shape ---------------------------------------------------------------------------------------------- */

#define TEXT(name) \
    ret name(device gpu, char *out, u32 room) { return put_text(look(#name, gpu, ""), out, room); }
#define U32(name) \
    ret name(device gpu, u32 *out) { return put_u32(look(#name, gpu, ""), out); }
#define U64(name) \
    ret name(device gpu, u64 *out) { return put_u64(look(#name, gpu, ""), out); }
#define U32_BY(name) \
    ret name(device gpu, u32 a, u32 *out) { return put_u32(look(#name, gpu, ",%u", a), out); }
#define U64_BY_TWO(name) \
    ret name(device gpu, u32 a, u32 b, u64 *out) { return put_u64(look(#name, gpu, ",%u,%u", a, b), out); }

TEXT(nvmlDeviceGetUUID)
TEXT(nvmlDeviceGetName)
U32(nvmlDeviceGetNumaNodeId)
U32(nvmlDeviceGetCurrPcieLinkGeneration)
U32(nvmlDeviceGetMaxPcieLinkGeneration)
U32(nvmlDeviceGetCurrPcieLinkWidth)
U32(nvmlDeviceGetMaxPcieLinkWidth)
U32(nvmlDeviceGetPcieReplayCounter)
U32(nvmlDeviceGetPowerUsage)
U32(nvmlDeviceGetEnforcedPowerLimit)
U32(nvmlDeviceGetPowerManagementDefaultLimit)
U32(nvmlDeviceGetPersistenceMode)
U32(nvmlDeviceGetComputeMode)
U32(nvmlDeviceGetDefaultEccMode)
U32(nvmlDeviceGetC2cModeInfoV)
U64(nvmlDeviceGetCurrentClocksThrottleReasons)
U64(nvmlDeviceGetCurrentClocksEventReasons)
U32_BY(nvmlDeviceGetNvLinkState)
U32_BY(nvmlDeviceGetNvLinkVersion)
U32_BY(nvmlDeviceGetNvLinkRemoteDeviceType)
U32_BY(nvmlDeviceGetTemperature)
U32_BY(nvmlDeviceGetTemperatureThreshold)
U32_BY(nvmlDeviceGetClockInfo)
U32_BY(nvmlDeviceGetMaxClockInfo)
U64_BY_TWO(nvmlDeviceGetNvLinkErrorCounter)
U64_BY_TWO(nvmlDeviceGetTotalEccErrors)

/* Calls with structures ------------------------------------------------------------------------------------------- */

struct pci_info {
    char legacy[16];
    u32 domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

static ret put_pci(struct answer a, struct pci_info *out)
{
    memset(out, 0, sizeof *out);
    ret code = put_text(a, out->bus_id, sizeof out->bus_id);
    if (code == OK && !a.garbage)
        sscanf(out->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    return code;
}

ret nvmlDeviceGetPciInfo_v3(device gpu, struct pci_info *out)
{
    return put_pci(look("nvmlDeviceGetPciInfo", gpu, ""), out);
}

ret nvmlDeviceGetNvLinkRemotePciInfo_v2(device gpu, u32 link, struct pci_info *out)
{
    return put_pci(look("nvmlDeviceGetNvLinkRemotePciInfo", gpu, ",%u", link), out);
}

static ret put_three(struct answer a, u64 out[3])
{
    for (int i = 0; a.code == OK && i < 3; i++)
        out[i] = next(&a);
    return a.code;
}

ret nvmlDeviceGetMemoryInfo(device gpu, u64 out[3]) { return put_three(look("nvmlDeviceGetMemoryInfo", gpu, ""), out); }

ret nvmlDeviceGetBAR1MemoryInfo(device gpu, u64 out[3])
{
    return put_three(look("nvmlDeviceGetBAR1MemoryInfo", gpu, ""), out);
}

static ret put_each(struct answer a, int count, ...)
{
    va_list list;
    va_start(list, count);
    for (int i = 0; a.code == OK && i < count; i++)
        *va_arg(list, u32 *) = (u32)next(&a);
    va_end(list);
    return a.code;
}

ret nvmlDeviceGetCudaComputeCapability(device gpu, u32 *major, u32 *minor)
{
    return put_each(look("nvmlDeviceGetCudaComputeCapability", gpu, ""), 2, major, minor);
}

ret nvmlDeviceGetMigMode(device gpu, u32 *now, u32 *pending)
{
    return put_each(look("nvmlDeviceGetMigMode", gpu, ""), 2, now, pending);
}

U32(nvmlDeviceGetMaxMigDeviceCount)
U32(nvmlDeviceGetGpuInstanceId)
U32(nvmlDeviceGetComputeInstanceId)

ret nvmlDeviceGetMigDeviceHandleByIndex(device gpu, u32 place, device *out)
{
    struct answer answer = look("nvmlDeviceGetMigDeviceHandleByIndex", gpu, ",%u", place);
    if (answer.code != OK)
        return answer.code;
    if (place >= SLICES_MAX)
        return INVALID_ARGUMENT;
    slices[gpu->index][place] = (struct device){gpu->index, place + 1};
    *out = &slices[gpu->index][place];
    return OK;
}

ret nvmlDeviceGetEccMode(device gpu, u32 *now, u32 *pending)
{
    return put_each(look("nvmlDeviceGetEccMode", gpu, ""), 2, now, pending);
}

ret nvmlDeviceGetUtilizationRates(device gpu, u32 out[2])
{
    return put_each(look("nvmlDeviceGetUtilizationRates", gpu, ""), 2, out, out + 1);
}

ret nvmlDeviceGetRemappedRows(device gpu, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed)
{
    return put_each(look("nvmlDeviceGetRemappedRows", gpu, ""), 4, corrected, uncorrected, pending, failed);
}

static ret put_words(struct answer a, u32 words, unsigned long *out)
{
    for (u32 i = 0; a.code == OK && i < words; i++)
        out[i] = (unsigned long)next(&a);
    return a.code;
}

ret nvmlDeviceGetCpuAffinity(device gpu, u32 words, unsigned long *out)
{
    return put_words(look("nvmlDeviceGetCpuAffinity", gpu, ",%u", words), words, out);
}

ret nvmlDeviceGetMemoryAffinity(device gpu, u32 words, unsigned long *out, u32 scope)
{
    return put_words(look("nvmlDeviceGetMemoryAffinity", gpu, ",%u,%u", words, scope), words, out);
}

ret nvmlDeviceGetTopologyCommonAncestor(device gpu, device other, u32 *out)
{
    return put_u32(look("nvmlDeviceGetTopologyCommonAncestor", gpu, ",gpu%u", other->index), out);
}

ret nvmlDeviceGetP2PStatus(device gpu, device other, u32 capability, u32 *out)
{
    return put_u32(look("nvmlDeviceGetP2PStatus", gpu, ",gpu%u,%u", other->index, capability), out);
}

struct field_value {
    u32 field, scope;
    long long timestamp, latency;
    u32 type;
    ret code;
    u64 value;
};

ret nvmlDeviceGetFieldValues(device gpu, int count, struct field_value *values)
{
    struct answer whole = {OK, 0, NULL};
    if (inject(&whole, "nvmlDeviceGetFieldValues", (int)gpu->index) && whole.code != OK)
        return whole.code;
    for (int i = 0; i < count; i++) {
        struct answer a = look("nvmlDeviceGetFieldValues", gpu, ",%u,%u", values[i].field, values[i].scope);
        values[i].type = a.garbage ? 0xA5 : 3; /* unsigned long long */
        values[i].code = a.code;
        if (a.code == OK)
            values[i].value = next(&a);
    }
    return OK;
}

struct fabric_info {
    u32 version;
    unsigned char cluster[16];
    u32 status, clique;
    unsigned char state;
    u32 health;
    unsigned char summary; /* of version 3 */
};

/* A profile's answer with 21 numbers is of version 3, one with 20 of a driver that knows version 2 only. */
ret nvmlDeviceGetGpuFabricInfoV(device gpu, struct fabric_info *out)
{
    struct answer a = look("nvmlDeviceGetGpuFabricInfoV", gpu, "");
    int numbers = 1, third = out->version == 0x3000028;
    if (a.code != OK)
        return a.code;
    for (const char *p = a.value; *p; p++)
        numbers += *p == ' ';
    if (!(third && (a.garbage || numbers > 20)) && out->version != 0x2000024)
        return 25; /* ARGUMENT_VERSION_MISMATCH */
    for (int i = 0; i < 16; i++)
        out->cluster[i] = (unsigned char)next(&a);
    out->status = (u32)next(&a);
    out->clique = (u32)next(&a);
    out->state = (unsigned char)next(&a);
    out->health = (u32)next(&a);
    if (third)
        out->summary = (unsigned char)next(&a);
    return OK;
}

struct sram_status {
    u32 version;
    u64 counts[11];
    u32 exceeded;
};

ret nvmlDeviceGetSramEccErrorStatus(device gpu, struct sram_status *out)
{
    struct answer a = look("nvmlDeviceGetSramEccErrorStatus", gpu, "");
    if (out->version != 0x1000068)
        return 25; /* ARGUMENT_VERSION_MISMATCH */
    if (a.code != OK)
        return a.code;
    next(&a); /* the version, as it stands in a recording */
    for (int i = 0; i < 11; i++)
        out->counts[i] = next(&a);
    out->exceeded = (u32)next(&a);
    return OK;
}

ret nvmlDeviceGetRowRemapperHistogram(device gpu, u32 out[5])
{
    return put_each(look("nvmlDeviceGetRowRemapperHistogram", gpu, ""), 5, out, out + 1, out + 2, out + 3, out + 4);
}

/* Events: the profile has one line, "nvmlEventSetWait <tab> <tab> GPU XID GPU XID ...", and they come one by one. */

struct event { device device; u64 type, data; u32 gpu_instance, compute_instance; };

static char *events;

ret nvmlEventSetCreate(void **set)
{
    struct answer a = look("nvmlEventSetWait", NULL, "");
    if (a.code != OK)
        return a.code;
    events = a.garbage ? NULL : (char *)a.value;
    *set = &events;
    return OK;
}

ret nvmlDeviceGetSupportedEventTypes(device gpu, u64 *out)
{
    struct answer a = {OK, 0, NULL};
    if (inject(&a, "nvmlDeviceGetSupportedEventTypes", (int)gpu->index) && a.code != OK)
        return a.code;
    *out = 8;
    return OK;
}

ret nvmlDeviceRegisterEvents(device gpu, u64 types, void *set)
{
    struct answer a = {OK, 0, NULL};
    (void)types;
    (void)set;
    inject(&a, "nvmlDeviceRegisterEvents", (int)gpu->index);
    return a.code;
}

ret nvmlEventSetWait_v2(void *set, struct event *out, u32 milliseconds)
{
    char *end;
    (void)set;
    (void)milliseconds;
    unsigned long gpu = events ? strtoul(events, &end, 10) : 0;
    if (!events || end == events)
        return 10; /* TIMEOUT */
    *out = (struct event){&devices[gpu % GPUS_MAX], 8, strtoul(end, &events, 10), 0, 0};
    return OK;
}

struct process { u32 pid; u64 memory; u32 gpu_instance, compute_instance; };

/* As the driver does: success with nothing to tell, else INSUFFICIENT_SIZE until there is room. */
static ret put_list(struct answer a, u32 *count, u32 wanted, int *fill)
{
    u32 room = *count;
    *fill = 0;
    if (a.code != OK)
        return a.code;
    *count = wanted;
    if (wanted > room)
        return INSUFFICIENT_SIZE;
    *fill = 1;
    return OK;
}

ret nvmlDeviceGetComputeRunningProcesses_v3(device gpu, u32 *count, struct process *out)
{
    struct answer a = look("nvmlDeviceGetComputeRunningProcesses", gpu, "");
    int fill;
    u32 wanted = a.code != OK ? 0 : a.garbage ? 3 : (u32)next(&a);
    ret code = put_list(a, count, wanted, &fill);
    for (u32 i = 0; fill && out && i < wanted; i++) {
        out[i].pid = (u32)next(&a);
        out[i].memory = next(&a);
        out[i].gpu_instance = out[i].compute_instance = 0xFFFFFFFF;
    }
    return code;
}

ret nvmlDeviceGetRetiredPages(device gpu, u32 cause, u32 *count, u64 *out)
{
    struct answer a = look("nvmlDeviceGetRetiredPages", gpu, ",%u", cause);
    int fill;
    u32 wanted = a.code != OK ? 0 : a.garbage ? 3 : (u32)next(&a);
    ret code = put_list(a, count, wanted, &fill);
    for (u32 i = 0; fill && out && i < wanted; i++)
        out[i] = next(&a);
    return code;
}
