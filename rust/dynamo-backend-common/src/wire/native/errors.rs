//! Error records in the dialect of 1.6.1: a frontend of that version turns them into the right status of HTTP.

use serde_json::{Value, json};

use crate::error::{BackendError, DynamoError, ErrorType};

/// Returns the record of an error that ends a stream.
pub(crate) fn record(error: &DynamoError) -> Value {
    let mut record = error.record();
    let Some(members) = record.as_object_mut() else { return record };
    if let Some((status, message)) = asserted(error) {
        // A status that the engine asserts travels as JSON in the message; there is no text for clients.
        let (kind, class, reason) = asserted_as(status);
        members.insert("error_type".into(), json!(kind));
        members.insert("class".into(), json!(class));
        members.insert("reason".into(), json!(reason));
        members.insert("message".into(), json!(json!({"message": message, "code": status}).to_string()));
        members.remove("public");
        return record;
    }
    // 1.6.1 answers 500 to a reason that it does not list under the record's class.
    match error.error_type() {
        ErrorType::WorkerOverloaded => members.insert("reason".into(), json!("capacity.worker_overloaded")),
        ErrorType::ResourceExhausted => members.insert("reason".into(), json!("capacity.exhausted")),
        _ => None,
    };
    record
}

/// Returns the status and the text that an engine asserts, as JSON in the message of its error.
fn asserted(error: &DynamoError) -> Option<(i64, String)> {
    use BackendError::{InvalidArgument, Unknown};
    let may_assert = matches!(
        error.error_type(),
        ErrorType::InvalidArgument | ErrorType::Unknown | ErrorType::Backend(InvalidArgument | Unknown)
    );
    if !may_assert || !error.message().starts_with('{') {
        return None;
    }
    let body: Value = serde_json::from_str(error.message()).ok()?;
    Some((body["code"].as_i64()?, body["message"].as_str()?.to_owned()))
}

/// Returns type, class and reason that 1.6.1 gives a status which an engine asserts.
fn asserted_as(status: i64) -> (&'static str, &'static str, &'static str) {
    match status {
        401 => ("Unknown", "Unauthenticated", "request.unauthenticated"),
        403 => ("Unknown", "PermissionDenied", "request.permission_denied"),
        404 => ("Unknown", "NotFound", "request.not_found"),
        408 | 504 => ("ResponseTimeout", "DeadlineExceeded", "request.deadline_exceeded"),
        409 => ("Unknown", "Conflict", "request.conflict"),
        413 | 431 => ("InvalidArgument", "PayloadTooLarge", "request.payload_too_large"),
        415 => ("InvalidArgument", "UnsupportedMedia", "request.unsupported_media"),
        429 => ("ResourceExhausted", "RateLimited", "request.rate_limited"),
        499 => ("Cancelled", "Cancelled", "request.cancelled"),
        501 => ("Unknown", "NotImplemented", "runtime.not_implemented"),
        502 => ("Unknown", "BackendProtocol", "backend.protocol"),
        503 => ("Unavailable", "Unavailable", "backend.unavailable"),
        529 => ("ResourceExhausted", "CapacityExhausted", "capacity.exhausted"),
        400..=499 => ("InvalidArgument", "InvalidRequest", "request.invalid"),
        _ => ("Unknown", "Internal", "runtime.internal"),
    }
}
