// Streams and events. Nothing runs when it is asked for: it waits in its stream's queue until the
// host waits for something, as on a GPU that is busy. Then streams are interleaved by the seed, in
// one of three manners, within what events allow:
//
//   seed % 3 = 0   mixed: work of other streams runs now and then
//   seed % 3 = 1   late: nothing runs that was not waited for (finds a missing wait)
//   seed % 3 = 2   early: other streams run as far as they can first (finds an overwritten buffer)
#include <chrono>
#include "stream_types.h"

namespace cuda_on_cpu {

namespace {

// A GPU's queue holds about a thousand launches; the host waits at the next.
const long MAX_PENDING = 1024;

Registry<CUstream_st> streams; // the NULL streams of the devices too
Registry<CUevent_st> events;
CUstream_st *legacy_streams[MAX_DEVICES];

enum class Manner { mixed, late, early };

} // namespace

// ---- streams ------------------------------------------------------------------------------------

static CUstream_st *add_stream(bool blocking) {
    CUstream_st *stream = new CUstream_st();
    stream->device = current_device();
    stream->blocking = blocking;
    return streams.add(stream);
}

static CUstream_st *legacy_stream(int device) {
    CUstream_st *&stream = legacy_streams[device];
    if (!stream) {
        stream = add_stream(false);
        stream->device = device;
        stream->legacy = true;
    }
    return stream;
}

CUstream_st *find_stream(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return legacy_stream(current_device());
    return streams.has(handle) && !handle->destroyed ? handle : nullptr;
}

const std::vector<CUstream_st *> &all_streams() {
    return streams.objects;
}

bool event_exists(cudaEvent_t event) {
    return events.has(event);
}

// ---- running ------------------------------------------------------------------------------------

static double milliseconds() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

static bool can_run(const CUstream_st &stream) {
    if (stream.queue.empty()) return false;
    for (const auto &work : stream.queue.front()->after)
        if (!work->done) return false;
    return true;
}

// Runs the first operation of the stream. After a fault of the device operations only end.
static void run_head(CUstream_st &stream) {
    const std::shared_ptr<Work> work = stream.queue.front();
    stream.queue.pop_front();
    counters().values.pending--;
    if (work->run && !device_fault()) work->run();
    work->done = true;
    work->done_at = milliseconds();
    work->run = nullptr; // its arguments go, as events may keep the work itself for long
    work->after.clear();
}

static void forget_if_over(CUstream_st *stream) {
    if (!stream->destroyed || !stream->queue.empty()) return;
    streams.remove(stream);
    delete stream;
}

static std::vector<CUstream_st *> streams_that_can_run(const CUstream_st *but) {
    std::vector<CUstream_st *> ready;
    for (CUstream_st *stream : streams.objects)
        if (stream != but && can_run(*stream)) ready.push_back(stream);
    return ready;
}

// One operation of another stream; false if none can run.
static bool run_other(const CUstream_st *but) {
    const std::vector<CUstream_st *> ready = streams_that_can_run(but);
    if (ready.empty()) return false;
    run_head(*ready[random_below(static_cast<unsigned>(ready.size()))]);
    return true;
}

static void run_others(const CUstream_st *but) {
    switch (static_cast<Manner>(settings().seed % 3)) {
    case Manner::mixed:
        while (random_below(2) && run_other(but)) {}
        break;
    case Manner::late: break;
    case Manner::early:
        while (run_other(but)) {}
        break;
    }
}

// Runs until the work is done: what stands before it in its stream, and what that comes after.
static void complete(const std::shared_ptr<Work> &work) {
    while (!work->done) {
        run_others(work->stream);
        if (work->done) return;
        CUstream_st &stream = *work->stream;
        const std::shared_ptr<Work> head = stream.queue.front();
        const std::vector<std::shared_ptr<Work>> after = head->after;
        for (const auto &earlier : after) complete(earlier);
        if (!head->done) run_head(stream);
    }
}

static void forget_streams_that_are_over() {
    const std::vector<CUstream_st *> copy = streams.objects;
    for (CUstream_st *stream : copy) forget_if_over(stream);
}

static void wait_for(const std::shared_ptr<Work> &work) {
    if (!work || work->done) return;
    DeviceAccess access;
    complete(work);
    forget_streams_that_are_over();
}

void drain_stream(cudaStream_t handle) {
    const std::shared_ptr<Work> last = find_stream(handle)->last;
    wait_for(last);
}

void drain_device(int device) {
    DeviceAccess access;
    for (CUstream_st *stream : streams.objects)
        if (stream->device == device && stream->last) complete(stream->last);
    forget_streams_that_are_over();
}

// ---- submitting ---------------------------------------------------------------------------------

// The NULL stream waits for all blocking streams of its device, and they for it.
static void order_with_legacy(CUstream_st &stream, Work &work) {
    for (CUstream_st *other : streams.objects) {
        const bool ordered = (stream.legacy && other->blocking) ||
                             (stream.blocking && other->legacy);
        if (!ordered || other->device != stream.device) continue;
        if (other->last && !other->last->done) work.after.push_back(other->last);
    }
}

static void run_if_too_many() {
    if (counters().values.pending <= MAX_PENDING) return;
    DeviceAccess access;
    run_other(nullptr);
}

static std::shared_ptr<Work> enqueue(CUstream_st &stream, std::function<void()> run,
                                     std::shared_ptr<Work> after = nullptr) {
    auto work = std::make_shared<Work>();
    work->run = std::move(run);
    work->stream = &stream;
    if (after) work->after.push_back(std::move(after));
    order_with_legacy(stream, *work);
    stream.queue.push_back(work);
    stream.last = work;
    counters().values.pending++;
    if (settings().eager_streams) wait_for(work);
    else run_if_too_many();
    return work;
}

cudaError_t submit(cudaStream_t handle, std::function<void()> run) {
    CUstream_st *stream = find_stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) return capture_node(*stream, std::move(run));
    if (stream->legacy && legacy_stream_forbidden(stream->device)) {
        invalidate_captures();
        return cudaErrorStreamCaptureImplicit;
    }
    enqueue(*stream, std::move(run));
    return cudaSuccess;
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// ---- the API: streams ---------------------------------------------------------------------------

static cudaError_t create_stream(Call &call, cudaStream_t *stream, unsigned flags) {
    if (!stream || flags > cudaStreamNonBlocking) return call.done(cudaErrorInvalidValue);
    *stream = add_stream(flags == cudaStreamDefault);
    counters().values.streams++;
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    Call call("cudaStreamCreate");
    if (call.refused()) return call.refusal();
    return create_stream(call, stream, cudaStreamDefault);
}

extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    Call call("cudaStreamCreateWithFlags");
    if (call.refused()) return call.refusal();
    return create_stream(call, stream, flags);
}

extern "C" cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    Call call("cudaStreamCreateWithPriority");
    if (call.refused()) return call.refusal();
    return create_stream(call, stream, flags);
}

extern "C" cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Call call("cudaStreamDestroy", Call::gives_back);
    if (call.refused()) return call.refusal();
    CUstream_st *stream = find_stream(handle);
    if (!stream || stream->legacy) return call.done(cudaErrorInvalidResourceHandle);
    stream->destroyed = true;
    counters().values.streams--;
    forget_if_over(stream);
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Call call("cudaStreamSynchronize", Call::not_captured);
    if (call.refused()) return call.refusal();
    if (!find_stream(handle)) return call.done(cudaErrorInvalidResourceHandle);
    counters().values.synchronisations++;
    drain_stream(handle);
    return call.done(device_fault());
}

// A program that asks again and again must see an end: each question lets something run.
extern "C" cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Call call("cudaStreamQuery", Call::not_captured);
    if (call.refused()) return call.refusal();
    CUstream_st *stream = find_stream(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    if (stream->last && !stream->last->done) {
        DeviceAccess access;
        run_other(nullptr);
    }
    if (device_fault()) return call.done(device_fault());
    return call.done(stream->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}

extern "C" cudaError_t cudaDeviceSynchronize() {
    Call call("cudaDeviceSynchronize", Call::not_captured);
    if (call.refused()) return call.refusal();
    counters().values.synchronisations++;
    drain_device(current_device());
    return call.done(device_fault());
}

// ---- the API: events ----------------------------------------------------------------------------

static cudaError_t create_event(Call &call, cudaEvent_t *event, unsigned flags) {
    const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    if (!event || flags & ~known) return call.done(cudaErrorInvalidValue);
    *event = new CUevent_st();
    (*event)->flags = flags;
    events.add(*event);
    counters().values.events++;
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventCreate(cudaEvent_t *event) {
    Call call("cudaEventCreate");
    if (call.refused()) return call.refusal();
    return create_event(call, event, cudaEventDefault);
}

extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    Call call("cudaEventCreateWithFlags");
    if (call.refused()) return call.refusal();
    return create_event(call, event, flags);
}

extern "C" cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Call call("cudaEventDestroy", Call::gives_back);
    if (call.refused()) return call.refusal();
    if (!event_exists(event)) return call.done(cudaErrorInvalidResourceHandle);
    events.remove(event);
    delete event;
    counters().values.events--;
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    Call call("cudaEventRecord");
    if (call.refused()) return call.refusal();
    CUstream_st *stream = find_stream(handle);
    if (!stream || !event_exists(event)) return call.done(cudaErrorInvalidResourceHandle);
    if (stream->capture) return call.done(capture_record(*stream, *event));
    event->capture = nullptr;
    event->work = enqueue(*stream, nullptr);
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    Call call("cudaStreamWaitEvent");
    if (call.refused()) return call.refusal();
    CUstream_st *stream = find_stream(handle);
    if (!stream || !event_exists(event)) return call.done(cudaErrorInvalidResourceHandle);
    if (stream->capture || event->capture) return call.done(capture_wait(*stream, *event));
    if (!event->work || event->work->done) return cudaSuccess;
    if (event->work->stream == stream) return cudaSuccess;
    enqueue(*stream, nullptr, event->work);
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Call call("cudaEventSynchronize", Call::not_captured);
    if (call.refused()) return call.refusal();
    if (!event_exists(event)) return call.done(cudaErrorInvalidResourceHandle);
    if (event->capture) return call.done(cudaErrorCapturedEvent);
    counters().values.synchronisations++;
    wait_for(event->work);
    return call.done(device_fault());
}

extern "C" cudaError_t cudaEventQuery(cudaEvent_t event) {
    Call call("cudaEventQuery", Call::not_captured);
    if (call.refused()) return call.refusal();
    if (!event_exists(event)) return call.done(cudaErrorInvalidResourceHandle);
    if (event->capture) return call.done(cudaErrorCapturedEvent);
    if (event->work && !event->work->done) {
        DeviceAccess access;
        run_other(nullptr);
    }
    if (device_fault()) return call.done(device_fault());
    return call.done(!event->work || event->work->done ? cudaSuccess : cudaErrorNotReady);
}

extern "C" cudaError_t cudaEventElapsedTime(float *elapsed, cudaEvent_t start, cudaEvent_t end) {
    Call call("cudaEventElapsedTime");
    if (call.refused()) return call.refusal();
    if (!elapsed || !event_exists(start) || !event_exists(end))
        return call.done(cudaErrorInvalidResourceHandle);
    if ((start->flags | end->flags) & cudaEventDisableTiming || !start->work || !end->work)
        return call.done(cudaErrorInvalidResourceHandle);
    if (!start->work->done || !end->work->done) return call.done(cudaErrorNotReady);
    *elapsed = static_cast<float>(end->work->done_at - start->work->done_at);
    return cudaSuccess;
}
