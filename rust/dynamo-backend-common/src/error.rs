//! Typed errors: what the caller of an engine may do next, as a value that crosses the wire.

use std::fmt;

use serde_json::{Map, Value, json};

/// Kinds of failure that an engine reports about itself or about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendError {
    /// The request cannot be served as it is; its client sees the message (HTTP 400).
    InvalidArgument,
    /// Something that the engine needs could not be reached; another worker may try (503).
    CannotConnect,
    /// The engine is going away or never came up; another worker may go on (503).
    EngineShutdown,
    /// The stream ended without its end; another worker may go on (503).
    StreamIncomplete,
    /// The request was cancelled (499).
    Cancelled,
    /// The answer did not come in time (504).
    ResponseTimeout,
    /// A connection was lost half-way; another worker may go on (503).
    Disconnected,
    /// A peer did not answer in time (504).
    ConnectionTimeout,
    /// A failure without a name of its own; not tried again, and the client sees a generic text (500).
    Unknown,
}

impl BackendError {
    fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "InvalidArgument",
            Self::CannotConnect => "CannotConnect",
            Self::EngineShutdown => "EngineShutdown",
            Self::StreamIncomplete => "StreamIncomplete",
            Self::Cancelled => "Cancelled",
            Self::ResponseTimeout => "ResponseTimeout",
            Self::Disconnected => "Disconnected",
            Self::ConnectionTimeout => "ConnectionTimeout",
            Self::Unknown => "Unknown",
        }
    }
}

/// The category of a [`DynamoError`]: `Backend` for what engines report, the others for what the framework reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorType {
    /// A failure of an engine.
    Backend(BackendError),
    /// The request or a setting is wrong.
    InvalidArgument,
    /// A service or a worker could not be reached.
    CannotConnect,
    /// A connection ended before the answer did.
    Disconnected,
    /// A peer did not answer in time.
    ConnectionTimeout,
    /// The answer did not come before the deadline of the request.
    ResponseTimeout,
    /// The request was cancelled.
    Cancelled,
    /// Alive, but full.
    ResourceExhausted,
    /// The worker is full: another one may serve, or the same one later (529).
    WorkerOverloaded,
    /// Nothing serves this at the moment.
    Unavailable,
    /// The worker does not serve this (503).
    WorkerUnavailable,
    /// A failure without a name of its own.
    Unknown,
}

impl ErrorType {
    /// Returns the name without the word "Backend": what operators read and what tables of statuses list.
    pub fn name(self) -> &'static str {
        match self {
            Self::Backend(kind) => kind.name(),
            Self::InvalidArgument => "InvalidArgument",
            Self::CannotConnect => "CannotConnect",
            Self::Disconnected => "Disconnected",
            Self::ConnectionTimeout => "ConnectionTimeout",
            Self::ResponseTimeout => "ResponseTimeout",
            Self::Cancelled => "Cancelled",
            Self::ResourceExhausted => "ResourceExhausted",
            Self::WorkerOverloaded => "WorkerOverloaded",
            Self::Unavailable => "Unavailable",
            Self::WorkerUnavailable => "WorkerUnavailable",
            Self::Unknown => "Unknown",
        }
    }

    fn class(self) -> &'static str {
        match self.name() {
            "InvalidArgument" => "InvalidRequest",
            "Cancelled" => "Cancelled",
            "ConnectionTimeout" | "ResponseTimeout" => "DeadlineExceeded",
            "ResourceExhausted" | "WorkerOverloaded" => "CapacityExhausted",
            "Unknown" => "Internal",
            _ => "Unavailable",
        }
    }
}

/// A typed error with the chain of its causes. Formats as `{kind}: {message}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DynamoError {
    kind: ErrorType,
    message: String,
    cause: Option<Box<DynamoError>>,
}

/// A chain of causes is cut after this many, so that no record grows without bound.
const MAX_CAUSES: usize = 16;

impl DynamoError {
    /// Begins an error; its category is `Unknown` and its message empty until they are set.
    pub fn builder() -> DynamoErrorBuilder {
        DynamoErrorBuilder { kind: ErrorType::Unknown, message: String::new(), cause: None }
    }

    /// Returns the category.
    pub fn error_type(&self) -> ErrorType {
        self.kind
    }

    /// Returns the message without the category.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the error that this one was caused by.
    pub fn cause(&self) -> Option<&DynamoError> {
        self.cause.as_deref()
    }

    pub(crate) fn backend(kind: BackendError, message: impl Into<String>) -> Self {
        Self { kind: ErrorType::Backend(kind), message: message.into(), cause: None }
    }

    pub(crate) fn top(kind: ErrorType, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), cause: None }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::backend(BackendError::InvalidArgument, message)
    }

    /// Returns the record that travels: `error_type`, `message` and what else both systems read.
    pub(crate) fn record(&self) -> Value {
        self.record_at(0)
    }

    fn record_at(&self, depth: usize) -> Value {
        let name = self.kind.name();
        let mut record = Map::new();
        let scoped = match self.kind {
            ErrorType::Backend(_) => json!({ "Backend": name }),
            _ => json!(name),
        };
        record.insert("error_type".into(), scoped);
        record.insert("message".into(), json!(self.message));
        record.insert("class".into(), json!(self.kind.class()));
        record.insert("reason".into(), json!(format!("backend.{}", snake_case(name))));
        if name == "InvalidArgument" {
            record.insert("public".into(), json!({"type": "message", "message": self.message}));
        }
        if let Some(cause) = self.cause.as_deref().filter(|_| depth < MAX_CAUSES) {
            record.insert("caused_by".into(), cause.record_at(depth + 1));
        }
        Value::Object(record)
    }

    /// Takes an error of any type: one of ours as it is, another one as `Unknown` with its sources as causes.
    fn of(error: &(dyn std::error::Error + 'static), depth: usize) -> Self {
        if let Some(own) = error.downcast_ref::<DynamoError>() {
            return own.clone();
        }
        let source = error.source().filter(|_| depth < MAX_CAUSES);
        let cause = source.map(|source| Box::new(Self::of(source, depth + 1)));
        Self { kind: ErrorType::Unknown, message: error.to_string(), cause }
    }
}

fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(letter.to_ascii_lowercase());
    }
    text
}

impl fmt::Display for DynamoError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for DynamoError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as &(dyn std::error::Error + 'static))
    }
}

/// Collects the parts of a [`DynamoError`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DynamoErrorBuilder {
    kind: ErrorType,
    message: String,
    cause: Option<Box<DynamoError>>,
}

impl DynamoErrorBuilder {
    /// Sets the category.
    pub fn error_type(mut self, kind: ErrorType) -> Self {
        self.kind = kind;
        self
    }

    /// Sets the message. The client of a request reads it only for `InvalidArgument`.
    pub fn message(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// Sets what caused the error; a [`DynamoError`] keeps its category, any other error counts as `Unknown`.
    pub fn cause(mut self, cause: impl std::error::Error + 'static) -> Self {
        self.cause = Some(Box::new(DynamoError::of(&cause, 0)));
        self
    }

    /// Returns the error.
    pub fn build(self) -> DynamoError {
        DynamoError { kind: self.kind, message: self.message, cause: self.cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_its_kind_and_its_message() {
        let error = DynamoError::builder()
            .error_type(ErrorType::Backend(BackendError::InvalidArgument))
            .message("too long")
            .build();
        assert_eq!(error.to_string(), "InvalidArgument: too long");
        let any: anyhow::Error = error.into();
        assert_eq!(any.to_string(), "InvalidArgument: too long");
    }

    #[test]
    fn the_record_carries_the_chain_and_the_public_text() {
        let cause = std::io::Error::other("disk");
        let inner = DynamoError::builder()
            .error_type(ErrorType::Backend(BackendError::EngineShutdown))
            .message("gone")
            .cause(cause)
            .build();
        let error = DynamoError::builder()
            .error_type(ErrorType::Backend(BackendError::InvalidArgument))
            .message("no")
            .cause(inner)
            .build();
        let record = error.record();
        assert_eq!(record["error_type"], json!({"Backend": "InvalidArgument"}));
        assert_eq!(record["public"]["message"], "no");
        assert_eq!(record["reason"], "backend.invalid_argument");
        assert_eq!(record["caused_by"]["error_type"], json!({"Backend": "EngineShutdown"}));
        assert_eq!(record["caused_by"]["caused_by"]["message"], "disk");
        assert!(record["caused_by"].get("public").is_none());
    }
}
