/* A fake libnvidia-ml.so.1: answers NVML's calls from a shared table that a feeder writes.
 *
 * It does not know scenarios. nvmlInit takes the table's path from GPU_EXPORTER_NVML_TABLE. Each call first sleeps and
 * then fails if the table requests it, so hangs and errors can be scripted per device and call. A sleep ends early if the
 * feeder removes the delay. Signatures and struct layouts follow NVML's published API reference.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "table.h"

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, MEMORY = 20, ARGUMENT_VERSION_MISMATCH = 25 };

typedef int ret_t;
typedef struct { int device; int instance; } handle_t; /* instance < 0: the whole GPU */
typedef handle_t *dev_t_;

#define DEVICES 16
#define NVLINK_BYTES 202 /* NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES */
#define INSTANCES 8
static handle_t whole[DEVICES], part[DEVICES][INSTANCES];
static table_t *table;
static int users;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static ret_t map_table(void) {
    const char *path = getenv("GPU_EXPORTER_NVML_TABLE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    struct stat info;
    if (fd < 0) return DRIVER_NOT_LOADED;
    if (fstat(fd, &info) || info.st_size < (off_t)sizeof(table_t)) { close(fd); return DRIVER_NOT_LOADED; }
    void *memory = mmap(NULL, sizeof(table_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return DRIVER_NOT_LOADED;
    table_t *fresh = memory;
    volatile uint32_t *delay = &fresh->init_delay_us;
    for (uint64_t slept = 0; slept < *delay; slept += 5000) usleep(5000);
    if (fresh->magic != TABLE_MAGIC || fresh->version != TABLE_VERSION || fresh->init_rc != OK) {
        ret_t rc = fresh->magic == TABLE_MAGIC && fresh->init_rc ? (ret_t)fresh->init_rc : DRIVER_NOT_LOADED;
        munmap(memory, sizeof(table_t));
        return rc;
    }
    table = fresh;
    return OK;
}

ret_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    ret_t rc = users ? OK : map_table();
    if (rc == OK && users++ == 0)
        for (int d = 0; d < DEVICES; d++) {
            whole[d] = (handle_t){d, -1};
            for (int i = 0; i < INSTANCES; i++) part[d][i] = (handle_t){d, i};
        }
    pthread_mutex_unlock(&lock);
    return rc;
}
ret_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

ret_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    ret_t rc = users ? OK : UNINITIALIZED;
    if (users && --users == 0) { munmap(table, sizeof(table_t)); table = NULL; }
    pthread_mutex_unlock(&lock);
    return rc;
}

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

/* A consistent copy of the device (seqlock), after the call's delay and with its return code. */
static ret_t enter(dev_t_ handle, int call, device_t *copy) {
    if (!table) return UNINITIALIZED;
    if (!handle || handle->device < 0 || handle->device >= (int)table->device_count) return INVALID_ARGUMENT;
    volatile device_t *device = &table->devices[handle->device];
    uint64_t start = now_us();
    while (now_us() - start < device->calls[call].delay_us) {
        uint64_t left = device->calls[call].delay_us;
        usleep(left < 5000 ? (useconds_t)left : 5000);
    }
    for (;;) {
        uint32_t before = __atomic_load_n((uint32_t *)&device->sequence, __ATOMIC_ACQUIRE);
        if (before & 1) { usleep(10); continue; }
        memcpy(copy, (const void *)device, sizeof *copy);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (__atomic_load_n((uint32_t *)&device->sequence, __ATOMIC_ACQUIRE) == before) break;
    }
    return (ret_t)copy->calls[call].rc;
}
#define ENTER(call) device_t d; { ret_t rc_ = enter(handle, CALL_##call, &d); if (rc_) return rc_; }
#define WHOLE_ONLY() do { if (handle->instance >= 0) return INVALID_ARGUMENT; } while (0)

static void copy_text(char *out, unsigned length, const char *text) {
    size_t wanted = strlen(text), room = length ? length - 1 : 0, taken = wanted < room ? wanted : room;
    memcpy(out, text, taken);
    if (length) out[taken] = 0;
}

const char *nvmlErrorString(ret_t rc) { static char text[32]; snprintf(text, sizeof text, "error %d", rc); return text; }
ret_t nvmlSystemGetDriverVersion(char *out, unsigned length) {
    if (!table) return UNINITIALIZED;
    copy_text(out, length, table->driver_version);
    return OK;
}
ret_t nvmlSystemGetNVMLVersion(char *out, unsigned length) { copy_text(out, length, "13.580.00"); return OK; }
ret_t nvmlSystemGetCudaDriverVersion(int *out) { *out = 13000; return OK; }
ret_t nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

ret_t nvmlDeviceGetCount_v2(unsigned *count) {
    if (!table) return UNINITIALIZED;
    volatile uint32_t *delay = &table->count_delay_us;
    for (uint64_t slept = 0; slept < *delay; slept += 5000) usleep(5000);
    *count = table->device_count;
    return (ret_t)table->count_rc;
}
ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, dev_t_ *out) {
    if (!table) return UNINITIALIZED;
    if (index >= table->device_count) return INVALID_ARGUMENT;
    dev_t_ handle = &whole[index];
    ENTER(nvmlDeviceGetHandleByIndex);
    *out = handle;
    return OK;
}
ret_t nvmlDeviceGetIndex(dev_t_ handle, unsigned *out) { *out = (unsigned)handle->device; return OK; }

ret_t nvmlDeviceGetUUID(dev_t_ handle, char *out, unsigned length) {
    ENTER(nvmlDeviceGetUUID);
    copy_text(out, length, handle->instance < 0 ? d.uuid : d.instances[handle->instance].uuid);
    return OK;
}
ret_t nvmlDeviceGetName(dev_t_ handle, char *out, unsigned length) {
    ENTER(nvmlDeviceGetName);
    copy_text(out, length, handle->instance < 0 ? d.name : d.instances[handle->instance].name);
    return OK;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
ret_t nvmlDeviceGetPciInfo_v3(dev_t_ handle, pci_t *out) {
    ENTER(nvmlDeviceGetPciInfo);
    memset(out, 0, sizeof *out);
    copy_text(out->bus_id, sizeof out->bus_id, d.bus_id);
    copy_text(out->legacy, sizeof out->legacy, d.bus_id);
    return OK;
}
/* Calls of one number (layout.py). */
#define NUMBER(name, field) ret_t name(dev_t_ handle, unsigned *out) { \
    ENTER(name); \
    *out = d.field; \
    return d.field == UNSET ? NOT_SUPPORTED : OK; \
}
NUMBERS(NUMBER)

ret_t nvmlDeviceGetMigMode(dev_t_ handle, unsigned *current, unsigned *pending) {
    ENTER(nvmlDeviceGetMigMode);
    *current = *pending = d.mig_mode;
    return OK;
}
ret_t nvmlDeviceGetMaxMigDeviceCount(dev_t_ handle, unsigned *out) { (void)handle; *out = INSTANCES; return OK; }
ret_t nvmlDeviceGetMigDeviceHandleByIndex(dev_t_ handle, unsigned index, dev_t_ *out) {
    ENTER(nvmlDeviceGetMigDeviceHandleByIndex);
    if (index >= d.instance_count || !d.instances[index].uuid[0]) return NOT_FOUND; /* a gap */
    *out = &part[handle->device][index];
    return OK;
}
ret_t nvmlDeviceGetGpuInstanceId(dev_t_ handle, unsigned *out) {
    ENTER(nvmlDeviceGetUUID);
    if (handle->instance < 0) return INVALID_ARGUMENT;
    *out = d.instances[handle->instance].gpu_instance;
    return OK;
}
ret_t nvmlDeviceGetComputeInstanceId(dev_t_ handle, unsigned *out) {
    ENTER(nvmlDeviceGetUUID);
    if (handle->instance < 0) return INVALID_ARGUMENT;
    *out = d.instances[handle->instance].compute_instance;
    return OK;
}
/* The handle of a GPU instance is the handle of a MIG device in it. */
ret_t nvmlDeviceGetGpuInstanceById(dev_t_ handle, unsigned id, dev_t_ *out) {
    ENTER(nvmlDeviceGetGpuInstanceById);
    WHOLE_ONLY();
    for (unsigned i = 0; i < d.instance_count; i++) {
        if (!d.instances[i].uuid[0] || d.instances[i].gpu_instance != id) continue;
        *out = &part[handle->device][i];
        return OK;
    }
    return NOT_FOUND;
}
typedef struct { dev_t_ device; unsigned id, profile, start, size; } instance_info_t;
ret_t nvmlGpuInstanceGetInfo(dev_t_ handle, instance_info_t *out) {
    ENTER(nvmlDeviceGetGpuInstanceById);
    if (handle->instance < 0) return INVALID_ARGUMENT;
    *out = (instance_info_t){&whole[handle->device], d.instances[handle->instance].gpu_instance,
                             d.instances[handle->instance].profile_id, d.instances[handle->instance].start,
                             d.instances[handle->instance].slices};
    return OK;
}
typedef struct { unsigned sm, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; unsigned long long memory_mb; }
    attributes_t;
ret_t nvmlDeviceGetAttributes_v2(dev_t_ handle, attributes_t *out) {
    ENTER(nvmlDeviceGetUUID);
    if (handle->instance < 0) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->gpu_slices = d.instances[handle->instance].slices;
    out->compute_slices = d.instances[handle->instance].compute_slices;
    out->memory_mb = d.instances[handle->instance].memory_total >> 20;
    return OK;
}

typedef struct { unsigned gpu, memory; } rates_t;
ret_t nvmlDeviceGetUtilizationRates(dev_t_ handle, rates_t *out) {
    ENTER(nvmlDeviceGetUtilizationRates);
    WHOLE_ONLY();
    if (d.mig_mode) return NOT_SUPPORTED;
    *out = (rates_t){d.utilization, d.memory_utilization};
    return OK;
}
ret_t nvmlDeviceGetEncoderUtilization(dev_t_ handle, unsigned *out, unsigned *period_us) {
    ENTER(nvmlDeviceGetEncoderUtilization);
    *out = d.encoder; *period_us = 167000;
    return OK;
}
ret_t nvmlDeviceGetDecoderUtilization(dev_t_ handle, unsigned *out, unsigned *period_us) {
    ENTER(nvmlDeviceGetDecoderUtilization);
    *out = d.decoder; *period_us = 167000;
    return OK;
}

ret_t nvmlDeviceGetJpgUtilization(dev_t_ handle, unsigned *out, unsigned *period_us) {
    ENTER(nvmlDeviceGetJpgUtilization);
    *out = d.jpeg; *period_us = 167000;
    return OK;
}
ret_t nvmlDeviceGetOfaUtilization(dev_t_ handle, unsigned *out, unsigned *period_us) {
    ENTER(nvmlDeviceGetOfaUtilization);
    *out = d.ofa; *period_us = 167000;
    return OK;
}

typedef union { double d; unsigned u; unsigned long ul; unsigned long long ull; long long sll; int i; unsigned short us; } value_t;
typedef struct { unsigned long long time_us; value_t value; } sample_t;
/* As the driver does: without a buffer the size of the ring, with a buffer the entries newer than `since`. */
ret_t nvmlDeviceGetSamples(dev_t_ handle, int type, unsigned long long since, int *value_type, unsigned *count, sample_t *out) {
    ENTER(nvmlDeviceGetSamples);
    WHOLE_ONLY();
    int has_ring = type == 1 || (d.engine_rings >= 1 && (type == 3 || type == 4)) || (d.engine_rings >= 2 && (type == 8 || type == 9));
    if (type >= 8 && d.engine_rings < 2) return INVALID_ARGUMENT; /* as a driver that does not support these numbers yet */
    if (d.mig_mode || !has_ring) return NOT_SUPPORTED;
    *value_type = 1;
    if (!out) { *count = d.sample_count; return d.sample_count ? OK : NOT_FOUND; }
    unsigned found = 0;
    for (unsigned i = 0; i < d.sample_count && found < *count; i++)
        if (d.samples[i].time_us > since) {
            ring_sample_t *s = &d.samples[i];
            out[found].time_us = s->time_us;
            out[found++].value.u = type == 1 ? s->gpu : type == 3 ? s->encoder : type == 4 ? s->decoder : type == 8 ? s->jpeg : s->ofa;
        }
    *count = found;
    return found ? OK : NOT_FOUND;
}

typedef struct { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; } work_sample_t;
/* One entry for each process that has worked since: the time of its last work, and its mean over all periods since. The
 * drivers of Syllo/nvtop issue 110 and NVIDIA/go-nvml issue 51 answer like this, also with entries without a process. */
ret_t nvmlDeviceGetProcessUtilization(dev_t_ handle, work_sample_t *out, unsigned *count, unsigned long long since) {
    ENTER(nvmlDeviceGetProcessUtilization);
    WHOLE_ONLY();
    if (d.mig_mode) return NOT_SUPPORTED;
    unsigned found = 0, room = out ? *count : 0, periods = 0;
    for (unsigned i = 0; i < d.sample_count; i++) periods += d.samples[i].time_us > since;
    for (unsigned i = 0; i < d.work_count; i++) {
        const work_t *w = &d.work[i];
        unsigned seen = 0, sm = 0, decoder = 0;
        uint64_t last = 0;
        if (w->time_us <= since) continue;
        for (unsigned j = 0; j < d.work_count; j++) {
            if (d.work[j].pid != w->pid || d.work[j].time_us <= since) continue;
            seen += j < i;
            sm += d.work[j].sm, decoder += d.work[j].decoder, last = d.work[j].time_us;
        }
        if (seen) continue;
        if (found < room) out[found] = (work_sample_t){w->pid, last, sm / (periods ? periods : 1), 0, 0, decoder / (periods ? periods : 1)};
        found++;
    }
    for (unsigned i = 0; i < d.zombies; i++, found++)
        if (found < room) out[found] = (work_sample_t){i % 2 ? 0 : 2000000000u + i, since + 1, 4000000000u, 7, 4000000000u, 0};
    *count = found;
    return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : OK;
}

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
ret_t nvmlDeviceGetMemoryInfo_v2(dev_t_ handle, memory_v2_t *out) {
    ENTER(nvmlDeviceGetMemoryInfo);
    if (handle->instance >= 0) {
        instance_t *i = &d.instances[handle->instance];
        out->total = i->memory_total; out->used = i->memory_used; out->free = i->memory_free; out->reserved = 0;
        return OK;
    }
    out->total = d.memory_total; out->used = d.memory_used; out->free = d.memory_free; out->reserved = d.memory_reserved;
    return OK;
}
ret_t nvmlDeviceGetMemoryInfo(dev_t_ handle, memory_t *out) {
    memory_v2_t v2;
    ret_t rc = nvmlDeviceGetMemoryInfo_v2(handle, &v2);
    if (rc == OK) *out = (memory_t){v2.total, v2.free, v2.used + v2.reserved}; /* v1 counts reserved memory as used */
    return rc;
}

ret_t nvmlDeviceGetPowerUsage(dev_t_ handle, unsigned *out) { ENTER(nvmlDeviceGetPowerUsage); WHOLE_ONLY(); *out = d.power_mw; return OK; }
ret_t nvmlDeviceGetPowerManagementLimit(dev_t_ handle, unsigned *out) { return nvmlDeviceGetEnforcedPowerLimit(handle, out); }
ret_t nvmlDeviceGetTotalEnergyConsumption(dev_t_ handle, unsigned long long *out) {
    ENTER(nvmlDeviceGetTotalEnergyConsumption);
    *out = d.energy_mj;
    return OK;
}
ret_t nvmlDeviceGetTemperature(dev_t_ handle, int sensor, unsigned *out) {
    ENTER(nvmlDeviceGetTemperature);
    if (sensor) return INVALID_ARGUMENT;
    *out = d.temperature;
    return OK;
}
ret_t nvmlDeviceGetClockInfo(dev_t_ handle, int type, unsigned *out) {
    ENTER(nvmlDeviceGetClockInfo);
    *out = type == 2 ? d.memory_clock_mhz : d.sm_clock_mhz;
    return OK;
}
ret_t nvmlDeviceGetMaxClockInfo(dev_t_ handle, int type, unsigned *out) {
    ENTER(nvmlDeviceGetMaxClockInfo);
    *out = type == 2 ? d.memory_clock_mhz : d.sm_clock_max_mhz;
    return OK;
}
ret_t nvmlDeviceGetPerformanceState(dev_t_ handle, int *out) {
    ENTER(nvmlDeviceGetPerformanceState);
    *out = (int)d.performance_state;
    return OK;
}

ret_t nvmlDeviceGetTemperatureThreshold(dev_t_ handle, int type, unsigned *out) {
    ENTER(nvmlDeviceGetTemperatureThreshold);
    if (type < 0 || type >= (int)THRESHOLDS || !d.thresholds[type]) return NOT_SUPPORTED;
    *out = d.thresholds[type];
    return OK;
}
typedef struct { unsigned version; int sensor, celsius; } temperature_t;
ret_t nvmlDeviceGetTemperatureV(dev_t_ handle, temperature_t *out) {
    ENTER(nvmlDeviceGetTemperature);
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    out->celsius = (int)d.temperature;
    return OK;
}
typedef struct { unsigned version; int celsius; } margin_t;
ret_t nvmlDeviceGetMarginTemperature(dev_t_ handle, margin_t *out) {
    ENTER(nvmlDeviceGetMarginTemperature);
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    out->celsius = d.margin;
    return OK;
}
static ret_t link_value(const device_t *d, int position, unsigned *out) {
    if (!d->link[position]) return NOT_SUPPORTED;
    *out = d->link[position];
    return OK;
}
ret_t nvmlDeviceGetCurrPcieLinkGeneration(dev_t_ handle, unsigned *out) {
    ENTER(nvmlDeviceGetCurrPcieLinkGeneration);
    return link_value(&d, 0, out);
}
ret_t nvmlDeviceGetMaxPcieLinkGeneration(dev_t_ handle, unsigned *out) {
    ENTER(nvmlDeviceGetMaxPcieLinkGeneration);
    return link_value(&d, 1, out);
}
ret_t nvmlDeviceGetCurrPcieLinkWidth(dev_t_ handle, unsigned *out) {
    ENTER(nvmlDeviceGetCurrPcieLinkWidth);
    return link_value(&d, 2, out);
}
ret_t nvmlDeviceGetMaxPcieLinkWidth(dev_t_ handle, unsigned *out) {
    ENTER(nvmlDeviceGetMaxPcieLinkWidth);
    return link_value(&d, 3, out);
}
ret_t nvmlDeviceGetCpuAffinity(dev_t_ handle, unsigned words, unsigned long *out) {
    ENTER(nvmlDeviceGetCpuAffinity);
    if (!d.cpus[0] && !d.cpus[1]) return NOT_SUPPORTED;
    for (unsigned i = 0; i < words; i++) out[i] = i < 2 ? d.cpus[i] : 0;
    return OK;
}
ret_t nvmlDeviceGetTotalEccErrors(dev_t_ handle, int type, int counter, unsigned long long *out) {
    ENTER(nvmlDeviceGetTotalEccErrors);
    if (type < 0 || type > 1 || counter != 0) return INVALID_ARGUMENT;
    *out = d.ecc[type];
    return OK;
}
ret_t nvmlDeviceGetRemappedRows(dev_t_ handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER(nvmlDeviceGetRemappedRows);
    if (d.mig_mode && d.instance_count) return NOT_SUPPORTED;
    *corrected = d.remapped[0]; *uncorrected = d.remapped[1]; *pending = d.remapped[2]; *failed = d.remapped[3];
    return OK;
}

ret_t nvmlDeviceGetNvLinkState(dev_t_ handle, unsigned link, unsigned *out) {
    ENTER(nvmlDeviceGetNvLinkState);
    if (link >= MAX_LINKS) return INVALID_ARGUMENT;
    unsigned state = d.nvlinks[link];
    for (unsigned i = 0; i < d.field_count && state != 1; i++) /* the counter of an inactive link is not answered */
        if (d.fields[i].id == NVLINK_BYTES && d.fields[i].scope == link) state = d.fields[i].rc ? 1 : 2;
    *out = state - 1;
    return state ? OK : NOT_SUPPORTED;
}
/* Versions 2 and 3 begin with a version. The oldest structure has none, and ends with `state`. */
typedef struct { unsigned char cluster[16]; ret_t status; unsigned clique; unsigned char state; } fabric_t;
typedef struct { unsigned version; fabric_t known; unsigned health; unsigned char summary; } fabric_v3_t;
ret_t nvmlDeviceGetGpuFabricInfo(dev_t_ handle, fabric_t *out) {
    ENTER(nvmlDeviceGetGpuFabricInfo);
    if (!d.fabric[0]) return NOT_SUPPORTED;
    *out = (fabric_t){.state = (unsigned char)d.fabric[0], .status = (ret_t)d.fabric[1]};
    return OK;
}
ret_t nvmlDeviceGetGpuFabricInfoV(dev_t_ handle, fabric_v3_t *out) {
    ENTER(nvmlDeviceGetGpuFabricInfo);
    unsigned version = out->version >> 24, newest = d.fabric_version ? d.fabric_version : 3;
    size_t size = version == 3 ? sizeof *out : sizeof *out - 4;
    if (version < 2 || version > newest || (out->version & 0xffffff) != size) return ARGUMENT_VERSION_MISMATCH;
    out->known = (fabric_t){.state = (unsigned char)d.fabric[0], .status = (ret_t)d.fabric[1]};
    out->health = d.fabric[2];
    return OK;
}

typedef struct { unsigned id, scope; long long time, latency; int type; ret_t rc; value_t value; } field_t;
ret_t nvmlDeviceGetFieldValues(dev_t_ handle, int count, field_t *fields) {
    ENTER(nvmlDeviceGetFieldValues);
    for (int f = 0; f < count; f++) {
        fields[f].rc = NOT_SUPPORTED;
        for (unsigned i = 0; i < d.field_count; i++)
            if (fields[f].id == d.fields[i].id && fields[f].scope == d.fields[i].scope) {
                fields[f].type = (int)d.fields[i].type;
                fields[f].value.ull = d.fields[i].value;
                fields[f].rc = (ret_t)d.fields[i].rc;
            }
    }
    return OK;
}

/* GPM: a sample is a copy of integrals with their time; two samples give means. */
typedef struct { double time; unsigned count; gpm_metric_t metrics[MAX_GPM]; } gpm_sample_t;
typedef struct { unsigned id; ret_t rc; double value; char *short_name, *long_name, *unit; } gpm_told_t;
typedef struct { unsigned version, count; gpm_sample_t *first, *second; gpm_told_t metrics[]; } gpm_query_t;
typedef struct { unsigned version, supported; } gpm_support_t;
ret_t nvmlGpmQueryDeviceSupport(dev_t_ handle, gpm_support_t *out) {
    ENTER(nvmlGpmQueryDeviceSupport);
    if (out->version != 1) return ARGUMENT_VERSION_MISMATCH;
    out->supported = d.gpm_supported;
    return OK;
}
ret_t nvmlGpmSampleAlloc(gpm_sample_t **out) { *out = calloc(1, sizeof **out); return *out ? OK : MEMORY; }
ret_t nvmlGpmSampleFree(gpm_sample_t *sample) { free(sample); return OK; }
static void take_sample(gpm_sample_t *out, double time, const gpm_metric_t *metrics, unsigned count) {
    out->time = time;
    out->count = count;
    memcpy(out->metrics, metrics, count * sizeof *metrics);
}
ret_t nvmlGpmSampleGet(dev_t_ handle, gpm_sample_t *out) {
    ENTER(nvmlGpmSampleGet);
    if (!d.gpm_supported) return NOT_SUPPORTED;
    if (handle->instance < 0) take_sample(out, d.gpm_time, d.gpm, d.gpm_count);
    else take_sample(out, d.gpm_time, d.instances[handle->instance].gpm, d.instances[handle->instance].gpm_count);
    return OK;
}
/* The values of a GPU instance are the means of its compute instances. */
ret_t nvmlGpmMigSampleGet(dev_t_ handle, unsigned gpu_instance, gpm_sample_t *out) {
    ENTER(nvmlGpmSampleGet);
    WHOLE_ONLY();
    if (!d.gpm_supported) return NOT_SUPPORTED;
    unsigned found = 0;
    for (unsigned i = 0; i < d.instance_count; i++) {
        if (d.instances[i].gpu_instance != gpu_instance || !d.instances[i].uuid[0]) continue;
        if (!found++) { take_sample(out, d.gpm_time, d.instances[i].gpm, d.instances[i].gpm_count); continue; }
        for (unsigned m = 0; m < out->count; m++) out->metrics[m].integral += d.instances[i].gpm[m].integral;
    }
    for (unsigned m = 0; found && m < out->count; m++) out->metrics[m].integral /= found;
    return found ? OK : NOT_FOUND;
}
ret_t nvmlGpmMetricsGet(gpm_query_t *query) {
    if (query->version != 1) return ARGUMENT_VERSION_MISMATCH;
    const gpm_sample_t *first = query->first, *second = query->second;
    for (unsigned q = 0; q < query->count; q++) {
        query->metrics[q].rc = NOT_SUPPORTED;
        for (unsigned m = 0; m < second->count && m < first->count; m++) {
            if (second->metrics[m].id != query->metrics[q].id) continue;
            double gone = second->metrics[m].integral - first->metrics[m].integral, span = second->time - first->time;
            query->metrics[q].rc = OK;
            query->metrics[q].value = second->metrics[m].counts ? second->metrics[m].integral : gone / span; /* 0/0: NaN */
        }
    }
    return OK;
}

/* Events: each set has its own position in the common ring. */
typedef struct { uint64_t next; uint32_t devices; uint64_t types; } event_set_t;
typedef struct { dev_t_ device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_data_t;
ret_t nvmlEventSetCreate(event_set_t **out) {
    if (!table) return UNINITIALIZED;
    *out = calloc(1, sizeof **out);
    if (!*out) return MEMORY;
    (*out)->next = table->event_count;
    return OK;
}
ret_t nvmlEventSetFree(event_set_t *set) { free(set); return OK; }
ret_t nvmlDeviceGetSupportedEventTypes(dev_t_ handle, unsigned long long *out) {
    ENTER(nvmlDeviceRegisterEvents);
    *out = 0x1d;
    return OK;
}
ret_t nvmlDeviceRegisterEvents(dev_t_ handle, unsigned long long types, event_set_t *set) {
    ENTER(nvmlDeviceRegisterEvents);
    WHOLE_ONLY();
    set->devices |= 1u << handle->device;
    set->types |= types;
    return OK;
}
ret_t nvmlEventSetWait_v2(event_set_t *set, event_data_t *out, unsigned timeout_ms) {
    uint64_t start = now_us();
    for (;;) {
        if (!table) return UNINITIALIZED;
        while (set->next < __atomic_load_n(&table->event_count, __ATOMIC_ACQUIRE)) {
            const event_t *event = &table->events[set->next++ % MAX_EVENTS];
            if (!(set->devices >> event->device & 1) || !(set->types & event->type)) continue;
            *out = (event_data_t){&whole[event->device], event->type, event->data, ~0u, ~0u};
            return OK;
        }
        uint64_t gone = now_us() - start, limit = timeout_ms * 1000ull;
        if (gone >= limit) return TIMEOUT;
        usleep(limit - gone < 250000 ? (useconds_t)(limit - gone) : 250000); /* a driver would sleep in the kernel */
    }
}
ret_t nvmlEventSetWait(event_set_t *set, event_data_t *out, unsigned timeout_ms) { return nvmlEventSetWait_v2(set, out, timeout_ms); }
ret_t nvmlDeviceGetCurrentClocksEventReasons(dev_t_ handle, unsigned long long *out) {
    ENTER(nvmlDeviceGetCurrentClocksEventReasons);
    *out = d.reasons;
    return OK;
}
ret_t nvmlDeviceGetSupportedClocksEventReasons(dev_t_ handle, unsigned long long *out) {
    ENTER(nvmlDeviceGetCurrentClocksEventReasons);
    *out = d.reasons_supported;
    return OK;
}

ret_t nvmlDeviceGetCurrentClocksThrottleReasons(dev_t_ handle, unsigned long long *out) {
    return nvmlDeviceGetCurrentClocksEventReasons(handle, out);
}
ret_t nvmlDeviceGetSupportedClocksThrottleReasons(dev_t_ handle, unsigned long long *out) {
    return nvmlDeviceGetSupportedClocksEventReasons(handle, out);
}

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } running_t;
/* With MIG, the board lists all of its processes, unless the caller lacks the permission; an instance lists its own.
 * The table sets the size of an entry: some drivers around 535.43 use 32 bytes. */
static ret_t list_processes(dev_t_ handle, const device_t *d, uint32_t graphics, unsigned *count, char *out) {
    unsigned found = 0, room = out ? *count : 0, size = table->process_bytes ? table->process_bytes : sizeof(running_t);
    const instance_t *own = handle->instance < 0 ? NULL : &d->instances[handle->instance];
    if (!own && d->mig_mode && d->processes_by_instance == 1) return NO_PERMISSION;
    for (unsigned i = 0; i < d->process_count; i++) {
        const process_t *p = &d->processes[i];
        if (p->graphics != graphics) continue;
        if (own && (p->gpu_instance != own->gpu_instance || p->compute_instance != own->compute_instance)) continue;
        if (found < room) {
            running_t entry = {p->pid, p->memory, p->gpu_instance, p->compute_instance};
            if (d->processes_by_instance) entry.gpu_instance = entry.compute_instance = ~0u;
            memset(out + (size_t)found * size, 0, size);
            memcpy(out + (size_t)found * size, &entry, sizeof entry);
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}
ret_t nvmlDeviceGetComputeRunningProcesses_v3(dev_t_ handle, unsigned *count, char *out) {
    ENTER(nvmlDeviceGetComputeRunningProcesses);
    return list_processes(handle, &d, 0, count, out);
}
ret_t nvmlDeviceGetGraphicsRunningProcesses_v3(dev_t_ handle, unsigned *count, char *out) {
    ENTER(nvmlDeviceGetGraphicsRunningProcesses);
    return list_processes(handle, &d, 1, count, out);
}
ret_t nvmlDeviceGetComputeRunningProcesses_v2(dev_t_ handle, unsigned *count, char *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, out);
}
ret_t nvmlDeviceGetGraphicsRunningProcesses_v2(dev_t_ handle, unsigned *count, char *out) {
    return nvmlDeviceGetGraphicsRunningProcesses_v3(handle, count, out);
}
