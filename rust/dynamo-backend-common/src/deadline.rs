//! The forced end of a process whose orderly end takes too long.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Runs something on a thread of its own after a while, unless it is called off (by being dropped) before.
#[derive(Debug)]
pub(crate) struct Deadline {
    /// Dropping it wakes the thread, which then ends without a deed.
    _called_off: Sender<()>,
}

impl Deadline {
    /// Begins to wait; `expired` is what happens at the end of the time. `None`: the system has no thread for it.
    pub(crate) fn begin(time: Duration, expired: impl FnOnce() + Send + 'static) -> Option<Self> {
        let (called_off, wait) = channel::<()>();
        let thread = std::thread::Builder::new().name("deadline".into());
        let started = thread.spawn(move || {
            if wait.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                expired();
            }
        });
        started.ok().map(|_| Self { _called_off: called_off })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expires_after_its_time() {
        let (done, expired) = channel();
        let deadline = Deadline::begin(Duration::from_millis(1), move || done.send(()).unwrap());
        expired.recv().unwrap();
        drop(deadline);
    }

    #[test]
    fn does_nothing_once_it_is_called_off() {
        let (done, expired) = channel::<()>();
        // The thread owns `done`: the channel is closed when the thread has ended, without a message.
        let deadline = Deadline::begin(Duration::from_secs(3600), move || done.send(()).unwrap());
        drop(deadline);
        assert!(expired.recv().is_err());
    }
}
