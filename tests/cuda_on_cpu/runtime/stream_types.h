// stream_types.h - what streams.cpp and graphs.cpp share.
#ifndef CUDA_ON_CPU_STREAM_TYPES_H
#define CUDA_ON_CPU_STREAM_TYPES_H

#include "internal.h"

namespace cuda_on_cpu {

// One operation in a stream's queue.
struct Work {
    std::function<void()> run; // empty for the marks of events
    CUstream_st *stream;
    std::vector<std::shared_ptr<Work>> after; // in other streams
    bool done;
    double done_at; // milliseconds
};

struct Node {
    std::function<void()> run;
    std::vector<int> after; // indices of earlier nodes
};

// A capture under way: the graph that grows, and the streams that take part.
struct Capture {
    std::vector<Node> nodes;
    CUstream_st *origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool invalid;
};

} // namespace cuda_on_cpu

struct CUstream_st {
    int device;
    bool legacy;    // the NULL stream
    bool blocking;  // in order with the NULL stream
    bool destroyed; // by the program; it lives until its work is done
    std::deque<std::shared_ptr<cuda_on_cpu::Work>> queue;
    std::shared_ptr<cuda_on_cpu::Work> last;       // submitted, done or not
    std::shared_ptr<cuda_on_cpu::Capture> capture; // null: operations go to the queue
    std::vector<int> tail;                         // the nodes that the next one comes after
};

struct CUevent_st {
    unsigned flags;
    std::shared_ptr<cuda_on_cpu::Work> work;       // null: never recorded
    std::shared_ptr<cuda_on_cpu::Capture> capture; // recorded while capturing
    std::vector<int> nodes;                        // that it stands behind then
};

struct CUgraph_st {
    std::vector<cuda_on_cpu::Node> nodes;
};

struct CUgraphExec_st {
    std::shared_ptr<std::vector<cuda_on_cpu::Node>> nodes;
};

namespace cuda_on_cpu {

// The stream of a handle; null if there is none.
CUstream_st *find_stream(cudaStream_t handle);
const std::vector<CUstream_st *> &all_streams();
bool event_exists(cudaEvent_t event);

// In graphs.cpp: what an operation, an event, a wait means in a stream that is being captured.
cudaError_t capture_node(CUstream_st &stream, std::function<void()> run);
cudaError_t capture_record(CUstream_st &stream, CUevent_st &event);
cudaError_t capture_wait(CUstream_st &stream, const CUevent_st &event);
bool legacy_stream_forbidden(int device);

} // namespace cuda_on_cpu

#endif
