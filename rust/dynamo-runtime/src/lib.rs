//! The paths under which engines written for the guide find the trace of a request and the types of errors.
//!
//! Everything is that of `dynamo-backend-common`. No other module of the native crate of this name is here.

/// The trace of the current request.
pub mod logging {
    pub use dynamo_backend_common::telemetry::{
        DistributedTraceContext, get_distributed_tracing_context, inject_trace_headers_into_map,
    };
}

/// Typed errors.
pub mod error {
    pub use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
}
