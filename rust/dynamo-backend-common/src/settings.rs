//! Variables of the environment, with the names and defaults of the Python workers. A value that cannot be read is named in
//! the log, and the default counts.

use std::path::PathBuf;
use std::time::Duration;

/// Returns a variable that is set and not empty.
pub(crate) fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// Returns a number, at least `minimum`; a lower one becomes `minimum`.
pub(crate) fn float(name: &str, default: f64, minimum: f64) -> f64 {
    let Some(value) = text(name) else { return default };
    match value.trim().parse::<f64>() {
        Ok(number) if number.is_finite() => number.max(minimum),
        _ => {
            tracing::warn!("{name}={value} is not a number; using {default}");
            default
        }
    }
}

/// Returns a whole number, at least `minimum`.
pub(crate) fn integer(name: &str, default: i64, minimum: i64) -> i64 {
    let Some(value) = text(name) else { return default };
    match value.trim().parse::<i64>() {
        Ok(number) => number.max(minimum),
        Err(_) => {
            tracing::warn!("{name}={value} is not a whole number; using {default}");
            default
        }
    }
}

/// Returns a switch: 1, true, yes, on or their opposites.
pub(crate) fn switch(name: &str, default: bool) -> bool {
    let Some(value) = text(name) else { return default };
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => true,
        "0" | "false" | "no" | "off" => false,
        _ => {
            tracing::warn!("{name}={value} is not a switch; using {default}");
            default
        }
    }
}

/// Returns the words of a list with commas between them.
fn words(name: &str) -> Vec<String> {
    let value = text(name).unwrap_or_default();
    value.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn size(name: &str, default: usize, minimum: i64) -> usize {
    usize::try_from(integer(name, default as i64, minimum)).unwrap_or(default)
}

fn seconds(name: &str, default: f64, minimum: f64) -> Duration {
    Duration::try_from_secs_f64(float(name, default, minimum)).unwrap_or(Duration::MAX)
}

/// The limits and times of the listener for requests. Sizes are in bytes.
#[derive(Clone, Debug)]
pub(crate) struct ListenerSettings {
    pub(crate) host: Option<String>,
    pub(crate) port: u16,
    pub(crate) max_message_bytes: usize,
    pub(crate) max_decoded_bytes: usize,
    pub(crate) pending_bytes: usize,
    pub(crate) connection_pending_bytes: usize,
    pub(crate) run_limit: usize,
    pub(crate) queue_limit: usize,
    pub(crate) backlog: u32,
    pub(crate) max_connections: usize,
    pub(crate) max_streams: usize,
    pub(crate) handshake: Duration,
    pub(crate) max_handshakes: usize,
    pub(crate) tls_handshake: Duration,
    pub(crate) message: Duration,
    pub(crate) silence: Duration,
    pub(crate) write_stall: Duration,
    pub(crate) credit_stall: Duration,
    pub(crate) secret_path: Option<PathBuf>,
    pub(crate) connect_timeout: Duration,
    pub(crate) idle: Duration,
    pub(crate) call_home_networks: Vec<String>,
}

const MEGABYTE: usize = 1024 * 1024;
/// Far beyond what a process can hold.
const MOST_HANDSHAKES: usize = 1 << 20;

impl ListenerSettings {
    /// Reads `DYN_TCP_*` and the limits of requests.
    pub(crate) fn from_env() -> Self {
        let limit = size("DYN_ENGINE_REQUEST_LIMIT", 0, 0);
        let max_message_bytes = size("DYN_TCP_MAX_MESSAGE_SIZE", 32 * MEGABYTE, 1024);
        let (run_limit, queue_limit) = if limit > 0 {
            (limit, size("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", 16, 0))
        } else {
            (size("DYN_TCP_WORKER_POOL_SIZE", 10_000, 1), size("DYN_TCP_WORK_QUEUE_SIZE", 40_000, 0))
        };
        Self {
            host: text("DYN_TCP_RPC_HOST"),
            port: u16::try_from(integer("DYN_TCP_RPC_PORT", 0, 0)).unwrap_or(0),
            max_message_bytes,
            max_decoded_bytes: size("DYN_TCP_MAX_DECODED_MB", 256, 1) * MEGABYTE,
            pending_bytes: size("DYN_TCP_PENDING_BODIES_LIMIT_MB", 256, 1) * MEGABYTE,
            connection_pending_bytes: (size("DYN_TCP_CONNECTION_BODIES_LIMIT_MB", 64, 1) * MEGABYTE)
                .max(max_message_bytes),
            run_limit,
            queue_limit,
            backlog: u32::try_from(integer("DYN_TCP_LISTEN_BACKLOG", 1024, 1)).unwrap_or(1024),
            max_connections: size("DYN_TCP_MAX_CONNECTIONS", 4096, 1),
            max_streams: size("DYN_TCP_MAX_STREAMS", 16_384, 1),
            handshake: seconds("DYN_TCP_HANDSHAKE_TIMEOUT_SECS", 10.0, 0.1),
            max_handshakes: size("DYN_TCP_MAX_UNAUTHENTICATED", 256, 1).min(MOST_HANDSHAKES),
            tls_handshake: seconds("DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS", 3.0, 0.1),
            message: seconds("DYN_TCP_MESSAGE_TIMEOUT_SECS", 30.0, 0.1),
            silence: seconds("DYN_TCP_SILENCE_SECS", 90.0, 1.0),
            write_stall: seconds("DYN_TCP_WRITE_STALL_SECS", 60.0, 0.1),
            credit_stall: seconds("DYN_TCP_CREDIT_STALL_SECS", 300.0, 0.1),
            secret_path: text("DYN_TCP_SECRET_PATH").map(PathBuf::from),
            connect_timeout: seconds("DYN_TCP_CONNECT_TIMEOUT", 5.0, 0.1),
            idle: seconds("DYN_TCP_IDLE_CONNECTION_SECS", 600.0, 1.0),
            call_home_networks: words("DYN_TCP_CALL_HOME_NETWORKS"),
        }
    }
}

/// How long the phases of a worker's end may last.
#[derive(Clone, Debug)]
pub(crate) struct ShutdownTimes {
    pub(crate) grace: Duration,
    pub(crate) timeout: Duration,
    pub(crate) prefill_drain: Duration,
}

/// What is kept of the deadline for `drain()` and `cleanup()`.
const CLEANUP_RESERVE: Duration = Duration::from_secs(5);

impl ShutdownTimes {
    /// Reads the times of this process's end.
    pub(crate) fn from_env() -> Self {
        Self {
            grace: seconds("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 5.0, 0.0),
            timeout: Duration::from_secs(size("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", 30, 0) as u64),
            prefill_drain: seconds("DYN_PREFILL_DRAIN_TIMEOUT_S", 30.0, 0.0),
        }
    }

    /// Returns when, after the request to stop, the process is ended by force.
    pub(crate) fn deadline(&self) -> Duration {
        self.timeout.saturating_add(self.grace)
    }

    /// Returns until when streams in flight are waited for.
    pub(crate) fn streams_until(&self) -> Duration {
        self.deadline().saturating_sub(CLEANUP_RESERVE)
    }

    /// Returns until when a `start()` that was running may return.
    pub(crate) fn start_until(&self) -> Duration {
        let deadline = self.deadline();
        deadline.saturating_sub(CLEANUP_RESERVE.min(deadline / 2))
    }

    /// Returns how long the peers of a prefill worker may go on reading its memory.
    pub(crate) fn quiescence(&self) -> Duration {
        self.prefill_drain.min(self.timeout.saturating_sub(CLEANUP_RESERVE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_grace_still_leaves_time_for_the_cleanup() {
        let of = |grace, timeout| ShutdownTimes {
            grace: Duration::from_secs(grace),
            timeout: Duration::from_secs(timeout),
            prefill_drain: Duration::from_secs(30),
        };
        assert_eq!(of(5, 30).deadline(), Duration::from_secs(35));
        assert_eq!(of(60, 30).streams_until(), Duration::from_secs(85));
        assert_eq!(of(0, 2).start_until(), Duration::from_secs(1));
        assert_eq!(of(0, 2).quiescence(), Duration::ZERO);
        assert_eq!(of(5, 30).quiescence(), Duration::from_secs(25));
    }
}
