//! What leaves on one connection: items of all its streams, collected while others run, and control frames before them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::flag::Flag;
use crate::plane::lock;
use crate::wire::items::ItemBatch;

/// Waiting bytes from which on producers wait for the socket.
const HIGH_WATER_BYTES: usize = 256 * 1024;
/// Control frames that a caller may leave unread.
const MAX_CONTROL_BYTES: usize = 1024 * 1024;
/// Waiting bytes of items from which on a caller that opens more streams is dropped.
const MAX_BACKLOG_BYTES: usize = 4 * 1024 * 1024;
/// How large a buffer is kept for the next batch.
const KEPT_BYTES: usize = 64 * 1024;

#[derive(Debug, Default)]
struct Waiting {
    control: Vec<u8>,
    items: ItemBatch,
    is_scheduled: bool,
    is_closed: bool,
}

/// The outgoing half of one connection.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    waiting: Mutex<Waiting>,
    ready: Notify,
    is_full: AtomicBool,
    drained: Notify,
    /// Set when the rest is to be sent and the connection closed.
    pub(crate) leaving: Flag,
    /// Set when the connection is of no more use: nothing is sent or read.
    pub(crate) lost: Flag,
}

impl Outgoing {
    /// Adds items; they leave with whatever else is ready by then.
    pub(crate) fn add(&self, write: impl FnOnce(&mut ItemBatch)) {
        let mut waiting = lock(&self.waiting);
        if waiting.is_closed {
            return;
        }
        write(&mut waiting.items);
        if waiting.items.len() > HIGH_WATER_BYTES {
            self.is_full.store(true, Ordering::Release);
        }
        let first = !std::mem::replace(&mut waiting.is_scheduled, true);
        drop(waiting);
        if first {
            self.ready.notify_one();
        }
    }

    /// Sends a control frame before all items. A caller that reads none of them is dropped.
    pub(crate) fn control(&self, frame: &[u8]) {
        let mut waiting = lock(&self.waiting);
        if waiting.is_closed {
            return;
        }
        if waiting.control.len() + frame.len() > MAX_CONTROL_BYTES {
            drop(waiting);
            self.lost.set();
            return;
        }
        waiting.control.extend_from_slice(frame);
        waiting.is_scheduled = true;
        drop(waiting);
        self.ready.notify_one();
    }

    /// Returns whether the socket takes what streams make.
    pub(crate) fn has_room(&self) -> bool {
        !self.is_full.load(Ordering::Acquire)
    }

    /// Returns whether a caller left too much unread to be given another stream.
    pub(crate) fn is_overfull(&self) -> bool {
        !self.has_room() && lock(&self.waiting).items.len() > MAX_BACKLOG_BYTES
    }

    /// Returns the next time that the socket takes more again, from this call on, or the loss of the connection.
    pub(crate) fn drained(&self) -> Notified<'_> {
        self.drained.notified()
    }

    fn take(&self, control: &mut Vec<u8>, items: &mut Vec<u8>) -> bool {
        control.clear();
        let mut waiting = lock(&self.waiting);
        std::mem::swap(&mut waiting.control, control);
        waiting.items.take(items);
        let found = !(control.is_empty() && items.is_empty());
        waiting.is_scheduled = found;
        drop(waiting);
        if self.is_full.swap(false, Ordering::AcqRel) {
            self.drained.notify_waiters();
        }
        found
    }

    fn close(&self) {
        lock(&self.waiting).is_closed = true;
        self.lost.set();
        self.is_full.store(false, Ordering::Release);
        self.drained.notify_waiters();
    }

    /// Writes until the connection is lost, or has left and everything is written. A peer that reads nothing for `stall`
    /// is lost.
    pub(crate) async fn write_to<W: AsyncWrite + Unpin>(&self, mut socket: W, stall: Duration) {
        let (mut control, mut items) = (Vec::new(), Vec::new());
        loop {
            tokio::select! {
                biased;
                () = self.lost.wait() => break,
                () = self.ready.notified() => {
                    // Every task that is ready now makes its item first: all of them leave in one write.
                    tokio::task::yield_now().await;
                }
                () = self.leaving.wait() => {}
            }
            let mut is_broken = false;
            while self.take(&mut control, &mut items) {
                let write = async {
                    socket.write_all(&control).await?;
                    socket.write_all(&items).await?;
                    socket.flush().await // a plain socket has nothing to flush
                };
                let written = tokio::select! {
                    biased;
                    written = tokio::time::timeout(stall, write) => matches!(written, Ok(Ok(()))),
                    () = self.lost.wait() => false,
                };
                if !written {
                    is_broken = true;
                    break;
                }
                items.clear();
                items.shrink_to(KEPT_BYTES);
            }
            if is_broken || self.leaving.is_set() {
                break;
            }
        }
        self.close();
        // A peer that has gone already makes this fail, and there is nothing to be said to it.
        let _ = socket.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn room_that_came_before_it_was_waited_for_is_not_missed() {
        let outgoing = Outgoing::default();
        outgoing.is_full.store(true, Ordering::Release);
        let drained = outgoing.drained();
        assert!(!outgoing.has_room());
        outgoing.take(&mut Vec::new(), &mut Vec::new());
        tokio::time::timeout(Duration::from_secs(60), drained).await.expect("the room was missed");
        assert!(outgoing.has_room());
    }
}
