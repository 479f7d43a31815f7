// Conditional nodes of graphs: their conditions, types and bodies, and what graphs that have them may not do.
#include "case.h"

static CUgraph graph;
static CUgraphNode node;
static CUdeviceptr memory;
static CUstream stream;

static void prepare(void) {
    with_module();
    memory = device_bytes(4096);
    SET(cuGraphCreate, &graph, 0);
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
}

static CUgraphConditionalHandle condition(CUgraph of, unsigned value, unsigned flags) {
    CUgraphConditionalHandle handle = 0;
    SET(cuGraphConditionalHandleCreate, &handle, of, context, value, flags);
    return handle;
}

static CUgraphNodeParams looking_at(CUgraphConditionalHandle handle, CUgraphConditionalNodeType type, unsigned size) {
    CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_CONDITIONAL};
    params.conditional.handle = handle;
    params.conditional.type = type;
    params.conditional.size = size;
    params.conditional.ctx = context;
    return params;
}

// A node whose bodies each set the bytes of their number to a value.
static CUgraph *conditional(CUgraph of, CUgraphConditionalHandle handle, CUgraphConditionalNodeType type, unsigned size) {
    CUgraphNodeParams params = looking_at(handle, type, size);
    SET(cuGraphAddNode_v2, &node, of, NULL, NULL, 0, &params);
    for (unsigned i = 0; i < size; i++) {
        CUDA_MEMSET_NODE_PARAMS fill = {.dst = memory + 4 * i, .value = 100 + i, .elementSize = 4, .width = 1, .height = 1};
        CUgraphNode body;
        SET(cuGraphAddMemsetNode, &body, params.conditional.phGraph_out[i], NULL, 0, &fill, context);
    }
    return params.conditional.phGraph_out;
}

// The bodies that a launch has run, as bits.
static unsigned launched(CUgraphExec exec) {
    unsigned ran = 0;
    SET(cuMemsetD8Async, memory, 0, 64, stream);
    SET(cuGraphLaunch, exec, stream);
    SET(cuStreamSynchronize, stream);
    for (unsigned i = 0; i < 8; i++) ran |= (word_at(memory + 4 * i) == (int)(100 + i)) << i;
    return ran;
}

static CUgraphExec instantiated(CUgraph of) {
    CUgraphExec exec = NULL;
    SET(cuGraphInstantiateWithFlags, &exec, of, 0);
    return exec;
}

GROUP(made) {
    prepare();
    CUgraphConditionalHandle first, second, of_body;
    TRY("to null", cuGraphConditionalHandleCreate, NULL, graph, context, 0, 0);
    TRY("of no graph", cuGraphConditionalHandleCreate, &first, NULL, context, 0, 0);
    TRY("in no context", cuGraphConditionalHandleCreate, &first, graph, NULL, 0, 0);
    TRY("with flags that do not exist", cuGraphConditionalHandleCreate, &first, graph, context, 0, 2);
    TRY("of a graph", cuGraphConditionalHandleCreate, &first, graph, context, 0, 0);
    TRY("with a default", cuGraphConditionalHandleCreate, &second, graph, context, 7, CU_GRAPH_COND_ASSIGN_DEFAULT);
    YES(cuGraphConditionalHandleCreate, "handles count up from one", first == 1 && second == 2);
    CUgraph other;
    SET(cuGraphCreate, &other, 0);
    YES(cuGraphConditionalHandleCreate, "in each graph", condition(other, 0, 0) == 1);
    CUgraphNodeParams params = looking_at(0, CU_GRAPH_COND_TYPE_IF, 1);
    TRY("that looks at no condition", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    params = looking_at(99, CU_GRAPH_COND_TYPE_IF, 1);
    TRY("that looks at one that does not exist", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    params = looking_at(first, 3, 1);
    TRY("conditional of a type that does not exist", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    params = looking_at(first, CU_GRAPH_COND_TYPE_IF, 0);
    TRY("without bodies", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    params = looking_at(first, CU_GRAPH_COND_TYPE_IF, 3);
    TRY("an if of three bodies", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    params = looking_at(first, CU_GRAPH_COND_TYPE_WHILE, 2);
    TRY("a while of two bodies", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    params = looking_at(first, CU_GRAPH_COND_TYPE_IF, 1);
    params.conditional.ctx = NULL;
    TRY("conditional in no context", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    params = looking_at(first, CU_GRAPH_COND_TYPE_IF, 2);
    TRY("an if of two bodies", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &params);
    CUgraph body = params.conditional.phGraph_out[0];
    YES(cuGraphAddNode_v2, "an if of two bodies, gives two", body && body != params.conditional.phGraph_out[1]);
    TRY("of a body", cuGraphConditionalHandleCreate, &of_body, body, context, 0, 0);
    YES(cuGraphConditionalHandleCreate, "of a body, counts with its graph", of_body == 3);
    CUgraphNodeParams again = looking_at(first, CU_GRAPH_COND_TYPE_IF, 1);
    CUgraphNode more;
    TRY("that looks at the condition of another node", cuGraphAddNode_v2, &more, graph, NULL, NULL, 0, &again);
    CUgraphNodeType type;
    TRY("conditional", cuGraphNodeGetType, node, &type);
    TELL(cuGraphNodeGetType, "conditional, is", "%d", type);
    TRY("of a conditional node", cuGraphNodeSetParams, node, &params);
    again = looking_at(second, CU_GRAPH_COND_TYPE_WHILE, 1);
    TRY("conditional, in a body", cuGraphAddNode_v2, &more, body, NULL, NULL, 0, &again);
    TRY("that is a body", cuGraphDestroy, body);
    TRY("conditional", cuGraphClone, &other, graph);
    TRY("that is a body", cuGraphClone, &other, body);
    SET(cuGraphCreate, &other, 0);
    TRY("of a conditional graph", cuGraphAddChildGraphNode, &more, other, NULL, 0, graph);
    TRY("of a body", cuGraphAddChildGraphNode, &more, other, NULL, 0, body);
    CUgraphExec exec;
    CUDA_GRAPH_INSTANTIATE_PARAMS how = {0};
    TRY("with a condition that no node looks at", cuGraphInstantiateWithParams, &exec, graph, &how);
    TELL(cuGraphInstantiateWithParams, "with a condition that no node looks at, is", "%d", how.result_out);
    again = looking_at(of_body, CU_GRAPH_COND_TYPE_SWITCH, 4);
    TRY("a switch", cuGraphAddNode_v2, &more, graph, NULL, NULL, 0, &again);
    TRY("conditional", cuGraphInstantiateWithParams, &exec, graph, &how);
    CUgraphExec twice;
    TRY("conditional, again", cuGraphInstantiateWithParams, &twice, graph, &how);
    TELL(cuGraphInstantiateWithParams, "conditional, again, is", "%d", how.result_out);
    TRY("that is a body", cuGraphInstantiateWithFlags, &twice, body, 0);
    unsigned enabled;
    TRY("of a conditional node", cuGraphNodeGetEnabled, exec, node, &enabled);
    TRY("of a conditional node", cuGraphNodeSetEnabled, exec, node, 0);
    TRY("of a conditional node", cuGraphExecNodeSetParams, exec, node, &params);
    SET(cuGraphExecDestroy, exec);
    TRY("conditional, after the first one", cuGraphInstantiateWithParams, &exec, graph, &how);
    SET(cuGraphExecDestroy, exec);
    TRY("conditional", cuGraphDestroyNode, node);
    again = looking_at(first, CU_GRAPH_COND_TYPE_WHILE, 1);
    TRY("that looks at the condition of a node that is gone", cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &again);
}

GROUP(run) {
    prepare();
    CUgraph *bodies = conditional(graph, condition(graph, 1, CU_GRAPH_COND_ASSIGN_DEFAULT), CU_GRAPH_COND_TYPE_IF, 2);
    CUgraphNode fill;
    size_t count = 1;
    SET(cuGraphGetNodes, bodies[0], &fill, &count);
    CUgraphExec exec = instantiated(graph);
    TELL(cuGraphLaunch, "if 1, runs", "%x", launched(exec));
    TELL(cuGraphLaunch, "if 1, runs again", "%x", launched(exec));
    CUDA_MEMSET_NODE_PARAMS params = {.dst = memory + 20, .value = 105, .elementSize = 4, .width = 1, .height = 1};
    TRY("of a body", cuGraphExecMemsetNodeSetParams, exec, fill, &params, context);
    TELL(cuGraphExecMemsetNodeSetParams, "of a body, runs", "%x", launched(exec));
    TRY("of a body", cuGraphNodeSetEnabled, exec, fill, 0);
    TELL(cuGraphNodeSetEnabled, "of a body, runs", "%x", launched(exec));

    CUgraph other;
    SET(cuGraphCreate, &other, 0);
    conditional(other, condition(other, 0, CU_GRAPH_COND_ASSIGN_DEFAULT), CU_GRAPH_COND_TYPE_IF, 2);
    CUgraphExecUpdateResultInfo info;
    TRY("with another default", cuGraphExecUpdate_v2, exec, other, &info);
    TELL(cuGraphExecUpdate_v2, "with another default, runs", "%x", launched(exec));
    SET(cuGraphCreate, &other, 0);
    conditional(other, condition(other, 1, 0), CU_GRAPH_COND_TYPE_IF, 2);
    TRY("without a default", cuGraphExecUpdate_v2, exec, other, &info);
    SET(cuGraphCreate, &other, 0);
    conditional(other, condition(other, 1, 0), CU_GRAPH_COND_TYPE_IF, 1);
    TRY("with another number of bodies", cuGraphExecUpdate_v2, exec, other, &info);
    TELL(cuGraphExecUpdate_v2, "with another number of bodies, is", "%d", info.result);
    SET(cuGraphCreate, &other, 0);
    conditional(other, condition(other, 1, 0), CU_GRAPH_COND_TYPE_SWITCH, 2);
    TRY("with another type", cuGraphExecUpdate_v2, exec, other, &info);
    TELL(cuGraphExecUpdate_v2, "with another type, is", "%d", info.result);

    for (unsigned value = 0; value < 4; value++) {
        SET(cuGraphCreate, &other, 0);
        conditional(other, condition(other, value, CU_GRAPH_COND_ASSIGN_DEFAULT), CU_GRAPH_COND_TYPE_SWITCH, 3);
        TELL(cuGraphLaunch, "switch, runs", "%u: %x", value, launched(instantiated(other)));
    }
    SET(cuGraphCreate, &other, 0);
    conditional(other, condition(other, 0, CU_GRAPH_COND_ASSIGN_DEFAULT), CU_GRAPH_COND_TYPE_WHILE, 1);
    TELL(cuGraphLaunch, "while 0, runs", "%x", launched(instantiated(other)));
}

static void CUDA_CB called(void *data) { (void)data; }

// What a body must not have is found when its graph is instantiated.
static void without(const char *what, CUgraph of) {
    CUgraphExec exec;
    CUDA_GRAPH_INSTANTIATE_PARAMS how = {0};
    TRY(what, cuGraphInstantiateWithParams, &exec, of, &how);
    TELL(cuGraphInstantiateWithParams, what, "%d, with the node: %s", how.result_out, how.hErrNode_out ? "yes" : "no");
}

static CUgraph body_of_new(CUgraph *of) {
    SET(cuGraphCreate, of, 0);
    return conditional(*of, condition(*of, 1, CU_GRAPH_COND_ASSIGN_DEFAULT), CU_GRAPH_COND_TYPE_IF, 1)[0];
}

GROUP(bodies) {
    prepare();
    CUgraph of, child;
    CUDA_HOST_NODE_PARAMS host = {.fn = called};
    TRY("of the host, in a body", cuGraphAddHostNode, &node, body_of_new(&of), NULL, 0, &host);
    without("of the host, in a body", of);
    CUevent event;
    SET(cuEventCreate, &event, 0);
    TRY("in a body", cuGraphAddEventRecordNode, &node, body_of_new(&of), NULL, 0, event);
    without("that records, in a body", of);
    TRY("in a body", cuGraphAddEmptyNode, &node, body_of_new(&of), NULL, 0);
    without("empty, in a body", of);
    SET(cuGraphCreate, &child, 0);
    SET(cuGraphAddEmptyNode, &node, child, NULL, 0);
    TRY("in a body", cuGraphAddChildGraphNode, &node, body_of_new(&of), NULL, 0, child);
    without("with a child, in a body", of);
    SET(cuGraphAddHostNode, &node, child, NULL, 0, &host);
    TRY("of the host, in a body", cuGraphAddChildGraphNode, &node, body_of_new(&of), NULL, 0, child);
    without("with a child of the host, in a body", of);
}

GROUP(captured) {
    prepare();
    CUstreamCaptureStatus status;
    const CUgraphNode *after;
    const CUgraphEdgeData *edges;
    size_t count;
    CUgraph body, ended;
    CUstream other;
    SET(cuStreamCreate, &other, CU_STREAM_NON_BLOCKING);
    SET(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    SET(cuMemsetD32Async, memory, 100, 1, stream);
    SET(cuStreamGetCaptureInfo_v3, stream, &status, NULL, &graph, &after, &edges, &count);
    CUgraphNodeParams params = looking_at(condition(graph, 1, CU_GRAPH_COND_ASSIGN_DEFAULT), CU_GRAPH_COND_TYPE_IF, 1);
    TRY("conditional, in a capture", cuGraphAddNode_v2, &node, graph, after, edges, count, &params);
    TRY("a conditional node", cuStreamUpdateCaptureDependencies_v2, stream, &node, NULL, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    body = params.conditional.phGraph_out[0];
    TRY("a body", cuStreamBeginCaptureToGraph, other, body, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED);
    SET(cuMemsetD32Async, memory + 4, 101, 1, other);
    TRY("of a body", cuStreamEndCapture, other, &ended);
    YES(cuStreamEndCapture, "of a body, gives it", ended == body);
    SET(cuMemsetD32Async, memory + 8, 102, 1, stream);
    TRY("with a conditional node", cuStreamEndCapture, stream, &graph);
    TELL(cuGraphLaunch, "captured with a conditional node, runs", "%x", launched(instantiated(graph)));
}
