//! The worker's end of one answer, on the wire its request came over.

use std::time::Duration;

use super::mux::MuxSink;
use super::native::NativeSink;
use crate::error::{BackendError, DynamoError};
use crate::output::LLMEngineOutput;

/// Sends one answer, in order, as fast as its caller takes it.
#[derive(Debug)]
pub(crate) enum Sink {
    /// As one of the streams of a `mux` connection.
    Mux(MuxSink),
    /// Over a connection of its own.
    Native(NativeSink),
}

impl Sink {
    /// Returns whether nothing is sent any more: the stream has ended, or its caller has gone.
    pub(crate) fn is_done(&self) -> bool {
        match self {
            Self::Mux(sink) => sink.is_done(),
            Self::Native(sink) => sink.is_done(),
        }
    }

    /// Returns about how many bytes were sent.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Mux(sink) => sink.bytes(),
            Self::Native(sink) => sink.bytes(),
        }
    }

    /// Sends one chunk with this word as the end of its choice.
    pub(crate) fn send(&mut self, chunk: &LLMEngineOutput, index: u32, word: Option<&str>) -> Result<(), DynamoError> {
        match self {
            Self::Mux(sink) => sink.send(chunk, index, word),
            Self::Native(sink) => sink.send(chunk, index, word),
        }
    }

    /// Sends an object, in MessagePack.
    pub(crate) fn send_object(&mut self, object: &[u8]) -> Result<(), DynamoError> {
        match self {
            Self::Mux(sink) => sink.send_object(object),
            Self::Native(sink) => return sink.send_object(object),
        }
        Ok(())
    }

    /// Ends the stream, once: cleanly, or with an error.
    pub(crate) fn end(&mut self, error: Option<&DynamoError>) {
        match self {
            Self::Mux(sink) => sink.end(error),
            Self::Native(sink) => sink.end(error),
        }
    }

    /// Returns whether the next chunk may be sent now.
    pub(crate) fn has_credit(&self) -> bool {
        match self {
            Self::Mux(sink) => sink.has_credit(),
            Self::Native(sink) => sink.has_credit(),
        }
    }

    /// Returns once more may be sent or nothing is to be sent any more; `false` when the caller read nothing for too long.
    pub(crate) async fn wait_credit(&self, patience: Duration) -> bool {
        match self {
            Self::Mux(sink) => sink.wait_credit(patience).await,
            Self::Native(sink) => sink.wait_credit(patience).await,
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        // A task that was dropped half-way must not leave its caller waiting.
        self.end(Some(&DynamoError::backend(BackendError::EngineShutdown, "the worker is shutting down")));
    }
}
