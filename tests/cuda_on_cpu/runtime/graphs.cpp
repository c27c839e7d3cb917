// Stream capture and graphs. A captured operation becomes a node; a launch runs the nodes in an
// order that the seed chooses among those that their edges allow.
#include "stream_types.h"

namespace cuda_on_cpu {

namespace {

Registry<CUgraph_st> graphs;
Registry<CUgraphExec_st> executables;

} // namespace

// ---- capturing ----------------------------------------------------------------------------------

bool is_capturing(cudaStream_t handle) {
    const CUstream_st *stream = find_stream(handle);
    return stream && stream->capture;
}

bool capture_forbids_calls() {
    for (const CUstream_st *stream : all_streams()) {
        const Capture *capture = stream->capture.get();
        if (!capture || capture->origin != stream || capture->invalid) continue;
        if (capture->mode == cudaStreamCaptureModeGlobal) return true;
        const bool ours = capture->thread == std::this_thread::get_id();
        if (capture->mode == cudaStreamCaptureModeThreadLocal && ours) return true;
    }
    return false;
}

void invalidate_captures() {
    for (CUstream_st *stream : all_streams())
        if (stream->capture) stream->capture->invalid = true;
}

bool legacy_stream_forbidden(int device) {
    for (const CUstream_st *stream : all_streams())
        if (stream->capture && stream->blocking && stream->device == device) return true;
    return false;
}

cudaError_t capture_node(CUstream_st &stream, std::function<void()> run) {
    Capture &capture = *stream.capture;
    if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
    capture.nodes.push_back({std::move(run), stream.tail});
    stream.tail = {static_cast<int>(capture.nodes.size()) - 1};
    return cudaSuccess;
}

cudaError_t capture_record(CUstream_st &stream, CUevent_st &event) {
    if (stream.capture->invalid) return cudaErrorStreamCaptureInvalidated;
    event.work = nullptr;
    event.capture = stream.capture;
    event.nodes = stream.tail;
    return cudaSuccess;
}

// A stream that waits for an event of a capture takes part in it from now on.
cudaError_t capture_wait(CUstream_st &stream, const CUevent_st &event) {
    Capture *capture = event.capture.get();
    if (!capture) {
        stream.capture->invalid = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!capture->origin) return cudaErrorCapturedEvent; // its capture is over
    if (stream.legacy) return cudaErrorStreamCaptureImplicit;
    if (stream.capture && stream.capture != event.capture) return cudaErrorStreamCaptureMerge;
    stream.capture = event.capture;
    stream.tail.insert(stream.tail.end(), event.nodes.begin(), event.nodes.end());
    return cudaSuccess;
}

// Whether each node is the last of the origin stream or comes, over others, before it.
static bool all_joined(const Capture &capture) {
    std::vector<char> reached(capture.nodes.size());
    for (int node : capture.origin->tail) reached[static_cast<size_t>(node)] = 1;
    for (size_t i = capture.nodes.size(); i-- > 0;) {
        if (!reached[i]) return false; // later nodes only come after it, not before
        for (int before : capture.nodes[i].after) reached[static_cast<size_t>(before)] = 1;
    }
    return true;
}

static void leave_capture(const std::shared_ptr<Capture> &capture) {
    for (CUstream_st *stream : all_streams()) {
        if (stream->capture != capture) continue;
        stream->capture = nullptr;
        stream->tail.clear();
    }
    capture->origin = nullptr;
}

// ---- running ------------------------------------------------------------------------------------

static void run_nodes(const std::vector<Node> &nodes) {
    std::vector<char> done(nodes.size());
    for (size_t left = nodes.size(); left > 0; left--) {
        std::vector<size_t> ready;
        for (size_t i = 0; i < nodes.size(); i++) {
            bool can = !done[i];
            for (int before : nodes[i].after) can = can && done[static_cast<size_t>(before)];
            if (can) ready.push_back(i);
        }
        const size_t chosen = ready[random_below(static_cast<unsigned>(ready.size()))];
        if (!device_fault()) nodes[chosen].run();
        done[chosen] = 1;
    }
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// ---- the API ------------------------------------------------------------------------------------

extern "C" cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    Call call("cudaStreamBeginCapture");
    if (call.refused()) return call.refusal();
    CUstream_st *stream = find_stream(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    if (stream->legacy) return call.done(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return call.done(cudaErrorIllegalState);
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
    stream->capture->mode = mode;
    stream->capture->thread = std::this_thread::get_id();
    stream->tail.clear();
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Call call("cudaStreamEndCapture");
    if (call.refused()) return call.refusal();
    CUstream_st *stream = find_stream(handle);
    if (!stream || !graph) return call.done(cudaErrorInvalidResourceHandle);
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return call.done(cudaErrorIllegalState);
    if (capture->origin != stream) return call.done(cudaErrorStreamCaptureUnmatched);
    const bool joined = all_joined(*capture);
    leave_capture(capture);
    if (capture->invalid) return call.done(cudaErrorStreamCaptureInvalidated);
    if (!joined) return call.done(cudaErrorStreamCaptureUnjoined);
    *graph = new CUgraph_st{std::move(capture->nodes)};
    graphs.add(*graph);
    counters().values.graphs++;
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    Call call("cudaStreamIsCapturing");
    if (call.refused()) return call.refusal();
    CUstream_st *stream = find_stream(handle);
    if (!stream || !status) return call.done(cudaErrorInvalidResourceHandle);
    *status = !stream->capture           ? cudaStreamCaptureStatusNone
              : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

// Only the count: nodes have no handles here.
extern "C" cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    Call call("cudaGraphGetNodes");
    if (call.refused()) return call.refusal();
    if (!graphs.has(graph) || !count) return call.done(cudaErrorInvalidValue);
    if (nodes) return call.done(cudaErrorNotSupported);
    *count = graph->nodes.size();
    return cudaSuccess;
}

extern "C" cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                            unsigned long long) {
    Call call("cudaGraphInstantiate");
    if (call.refused()) return call.refusal();
    if (!executable || !graphs.has(graph)) return call.done(cudaErrorInvalidValue);
    *executable = new CUgraphExec_st{std::make_shared<std::vector<Node>>(graph->nodes)};
    executables.add(*executable);
    counters().values.graphs++;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    Call call("cudaGraphLaunch");
    if (call.refused()) return call.refusal();
    if (!executables.has(executable)) return call.done(cudaErrorInvalidValue);
    counters().values.graph_launches++;
    const std::shared_ptr<std::vector<Node>> nodes = executable->nodes;
    return call.done(submit(stream, [nodes] { run_nodes(*nodes); }));
}

extern "C" cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Call call("cudaGraphDestroy", Call::gives_back);
    if (call.refused()) return call.refusal();
    if (!graphs.has(graph)) return call.done(cudaErrorInvalidValue);
    graphs.remove(graph);
    delete graph;
    counters().values.graphs--;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    Call call("cudaGraphExecDestroy", Call::gives_back);
    if (call.refused()) return call.refusal();
    if (!executables.has(executable)) return call.done(cudaErrorInvalidValue);
    executables.remove(executable);
    delete executable;
    counters().values.graphs--;
    return cudaSuccess;
}
