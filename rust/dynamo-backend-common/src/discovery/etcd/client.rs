//! etcd's v3 API over its JSON gateway, which is part of every etcd server. Calls block.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::DynamoError;
use crate::http;
use crate::plane::lock;
use crate::settings;

const DEFAULT_PORT: &str = "2379";
const NOT_FOUND: i64 = 5;
const FAILED_PRECONDITION: i64 = 9;
const UNAUTHENTICATED: i64 = 16;
/// "Not here, not now" in gRPC's numbers: cancelled, deadline exceeded, resource exhausted, unavailable.
const TRY_ANOTHER: [i64; 4] = [1, 4, 8, 14];
/// etcd computes a password's hash on purpose slowly.
const AUTHENTICATE_PATIENCE: Duration = Duration::from_secs(5);

/// Why a call failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// No endpoint answered.
    Unreachable(String),
    /// etcd answered, and the answer was no; `code` is gRPC's number.
    Declined { code: i64, message: String },
}

impl Failure {
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Declined { code: NOT_FOUND, .. })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) => write!(formatter, "no etcd answers ({why})"),
            Self::Declined { message, .. } => formatter.write_str(message),
        }
    }
}

/// The endpoints of one cluster, and who this process is to it.
pub(super) struct Client {
    /// HOST:PORT of each.
    endpoints: Vec<String>,
    current: AtomicUsize,
    attempt: Duration,
    user: Option<(String, String)>,
    token: Mutex<Option<String>>,
}

impl Client {
    /// Fails, naming the setting, for endpoints that are none, and for what this client does not have.
    pub(super) fn new(endpoints: &str, attempt: Duration) -> Result<Self, DynamoError> {
        for name in ["ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"] {
            if settings::text(name).is_some() {
                return Err(DynamoError::invalid(format!("{name} is set, and the Rust SDK has no TLS: {USE_PLAIN}")));
            }
        }
        let user = match (settings::text("ETCD_AUTH_USERNAME"), settings::text("ETCD_AUTH_PASSWORD")) {
            (Some(name), Some(password)) => Some((name, password)),
            (None, None) => None,
            (name, _) => {
                let missing = if name.is_none() { "ETCD_AUTH_USERNAME" } else { "ETCD_AUTH_PASSWORD" };
                let text = format!("{missing} is not set; etcd needs a user and a password, or neither");
                return Err(DynamoError::invalid(text));
            }
        };
        let endpoints = parse_endpoints(endpoints)?;
        Ok(Self { endpoints, current: AtomicUsize::new(0), attempt, user, token: Mutex::default() })
    }

    pub(super) fn describe(&self) -> String {
        let urls: Vec<String> = self.endpoints.iter().map(|endpoint| format!("http://{endpoint}")).collect();
        urls.join(",")
    }

    // -- leases --------------------------------------------------------------------------------------------------

    /// Takes a lease of this id and returns the TTL in seconds that etcd made of it. One that is there is taken as it is.
    pub(super) fn grant(&self, lease_id: u64, ttl: u64) -> Result<u64, Failure> {
        match self.call("lease/grant", &json!({"ID": lease_id, "TTL": ttl})) {
            Ok(answer) => Ok(number(&answer["TTL"]).max(1) as u64),
            Err(Failure::Declined { code: FAILED_PRECONDITION, message }) if message.contains("already exists") => {
                let left = self.keep_alive(lease_id)?;
                Ok(if left > 0 { left as u64 } else { ttl })
            }
            Err(failure) => Err(failure),
        }
    }

    /// Renews a lease and returns its TTL in seconds; 0: there is no such lease any more.
    pub(super) fn keep_alive(&self, lease_id: u64) -> Result<i64, Failure> {
        let answer = self.call("lease/keepalive", &json!({"ID": lease_id}))?;
        Ok(number(&answer["result"]["TTL"]).max(0))
    }

    /// Returns the keys that vanish with a lease, in base64.
    pub(super) fn leased_keys(&self, lease_id: u64) -> Result<HashSet<String>, Failure> {
        let answer = self.call("lease/timetolive", &json!({"ID": lease_id, "keys": true}))?;
        let keys = answer["keys"].as_array().into_iter().flatten();
        Ok(keys.filter_map(|key| key.as_str().map(str::to_owned)).collect())
    }

    /// Gives a lease back, and its keys with it.
    pub(super) fn revoke(&self, lease_id: u64, patience: Duration) -> Result<(), Failure> {
        match self.call_within("lease/revoke", &json!({"ID": lease_id}), patience) {
            Err(failure) if !failure.is_not_found() => Err(failure),
            _ => Ok(()),
        }
    }

    // -- keys ----------------------------------------------------------------------------------------------------

    pub(super) fn put(&self, key: &str, value: &str, lease_id: u64) -> Result<(), Failure> {
        let body = json!({"key": encode(key.as_bytes()), "value": encode(value.as_bytes()), "lease": lease_id});
        self.call("kv/put", &body).map(drop)
    }

    pub(super) fn delete(&self, key: &str) -> Result<(), Failure> {
        self.call("kv/deleterange", &json!({"key": encode(key.as_bytes())})).map(drop)
    }

    /// Fails when this client's user may not read a key, whether or not it exists.
    pub(super) fn check_access(&self, key: &str) -> Result<(), Failure> {
        self.call("kv/range", &json!({"key": encode(key.as_bytes()), "count_only": true})).map(drop)
    }

    // -- requests ------------------------------------------------------------------------------------------------

    fn call(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call_within(path, body, self.attempt)
    }

    /// Sends one request to the first endpoint that answers it, beginning with the one that answered last.
    fn call_within(&self, path: &str, body: &Value, attempt: Duration) -> Result<Value, Failure> {
        let mut failures = Vec::new();
        for _ in &self.endpoints {
            let current = self.current.load(Ordering::Relaxed) % self.endpoints.len();
            let endpoint = &self.endpoints[current];
            match self.ask(endpoint, path, body, attempt) {
                Ok(answer) => return Ok(answer),
                Err(Asked::Declined { code, message })
                    if !TRY_ANOTHER.contains(&code) || message.contains("space exceeded") =>
                {
                    return Err(Failure::Declined { code, message });
                }
                Err(Asked::Declined { message, .. }) => failures.push(format!("http://{endpoint}: {message}")),
                Err(Asked::Lost(error)) => failures.push(format!("http://{endpoint}: {error}")),
            }
            self.current.store(current + 1, Ordering::Relaxed);
        }
        Err(Failure::Unreachable(failures.join("; ")))
    }

    fn ask(&self, endpoint: &str, path: &str, body: &Value, attempt: Duration) -> Result<Value, Asked> {
        let token = self.token_for(endpoint)?;
        match post(endpoint, path, body, token.as_deref(), attempt) {
            Err(Asked::Declined { code, message }) if self.user.is_some() && is_stale(code, &message) => {
                *lock(&self.token) = None; // tokens end after minutes, and with a server that restarts
                let token = self.token_for(endpoint)?;
                post(endpoint, path, body, token.as_deref(), attempt)
            }
            outcome => outcome,
        }
    }

    fn token_for(&self, endpoint: &str) -> Result<Option<String>, Asked> {
        let Some((name, password)) = &self.user else { return Ok(None) };
        let mut token = lock(&self.token);
        if token.is_none() {
            let body = json!({"name": name, "password": password});
            let answer = post(endpoint, "auth/authenticate", &body, None, self.attempt.max(AUTHENTICATE_PATIENCE));
            *token = match answer {
                Ok(answer) => answer["token"].as_str().map(str::to_owned),
                Err(Asked::Declined { message, .. }) if message.contains("not enabled") => return Ok(None),
                Err(Asked::Declined { code, message }) if !TRY_ANOTHER.contains(&code) => {
                    let message = format!(
                        "etcd declines the user {name:?} of ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD: {message}"
                    );
                    return Err(Asked::Declined { code: UNAUTHENTICATED, message });
                }
                Err(other) => return Err(other),
            };
        }
        Ok(token.clone())
    }
}

const USE_PLAIN: &str = "use http:// endpoints on a trusted network, or a tunnel on another one";

fn parse_endpoints(text: &str) -> Result<Vec<String>, DynamoError> {
    let mut found = Vec::new();
    for each in text.split(',').map(str::trim).filter(|each| !each.is_empty()) {
        let wrong = || DynamoError::invalid(format!("ETCD_ENDPOINTS: {each:?} is not http://HOST:PORT"));
        let rest = match each.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", _)) => {
                let text =
                    format!("ETCD_ENDPOINTS: {each:?} asks for TLS, which the Rust SDK does not have: {USE_PLAIN}");
                return Err(DynamoError::invalid(text));
            }
            Some(_) => return Err(wrong()),
            None => each,
        };
        let rest = rest.trim_end_matches('/');
        let has_port = rest.rsplit_once(':').is_some_and(|(host, port)| {
            !port.is_empty()
                && port.bytes().all(|byte| byte.is_ascii_digit())
                && (!host.contains(':') || host.ends_with(']'))
        });
        let endpoint = if has_port { rest.to_owned() } else { format!("{rest}:{DEFAULT_PORT}") };
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-._:[]".contains(letter);
        if rest.is_empty() || !endpoint.chars().all(is_plain) {
            return Err(wrong());
        }
        if !found.contains(&endpoint) {
            found.push(endpoint);
        }
    }
    if found.is_empty() {
        let text = "ETCD_ENDPOINTS names no endpoint; expected http://HOST:2379, with commas between several";
        return Err(DynamoError::invalid(text));
    }
    Ok(found)
}

/// Why one endpoint was asked in vain.
enum Asked {
    Lost(String),
    Declined { code: i64, message: String },
}

impl From<io::Error> for Asked {
    fn from(error: io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

fn is_stale(code: i64, message: &str) -> bool {
    code == UNAUTHENTICATED || message.contains("invalid auth token")
}

fn post(endpoint: &str, path: &str, body: &Value, token: Option<&str>, patience: Duration) -> Result<Value, Asked> {
    let token = token.map(|token| format!("Authorization: {token}\r\n")).unwrap_or_default();
    let headers = format!("Content-Type: application/json\r\n{token}Grpc-Metadata-hasleader: true\r\n");
    read_answer(&http::post(endpoint, &format!("/v3/{path}"), &headers, body.to_string().as_bytes(), patience)?)
}

fn read_answer(answer: &http::Answer) -> Result<Value, Asked> {
    let (status, body) = (answer.status, &answer.body);
    if status == 200 {
        return serde_json::from_slice(body).map_err(|_| Asked::Lost("not an answer of etcd's".into()));
    }
    let Ok(refusal) = serde_json::from_slice::<Value>(body) else {
        let (code, message) = match status {
            404 => (12, "this server has no /v3 JSON gateway (etcd: --enable-grpc-gateway)".to_owned()),
            // Something in front of etcd.
            500.. => (14, format!("HTTP status {status}")),
            _ => (2, format!("HTTP status {status}")),
        };
        return Err(Asked::Declined { code, message });
    };
    let message = refusal["message"].as_str().or(refusal["error"].as_str()).unwrap_or("no reason given");
    Err(Asked::Declined { code: number(&refusal["code"]), message: message.to_owned() })
}

/// Reads a whole number: the gateway writes those of 64 bits as texts.
fn number(value: &Value) -> i64 {
    value.as_i64().or_else(|| value.as_str()?.parse().ok()).unwrap_or(0)
}

/// Writes bytes in base64, as the gateway has keys and values.
pub(super) fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let number = three.iter().fold(0u32, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for place in 0..4 {
            let digit = (number >> (18 - 6 * place)) & 63;
            text.push(if place > three.len() { '=' } else { char::from(DIGITS[digit as usize]) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_has_its_padding() {
        for (plain, encoded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(encode(plain.as_bytes()), encoded);
        }
    }

    #[test]
    fn endpoints_have_ports_and_no_tls() {
        let found = parse_endpoints("a, http://b:1/ ,http://[::1]:9,a").expect("endpoints");
        assert_eq!(found, ["a:2379", "b:1", "[::1]:9"]);
        for wrong in ["", "https://a", "ftp://a", "http://a b", "http://a/x"] {
            assert!(parse_endpoints(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn answers_are_values_or_refusals() {
        let read = |status, body: &str| read_answer(&http::Answer { status, body: body.into() });
        assert!(read(200, "{\"TTL\":\"7\"}").is_ok_and(|answer| number(&answer["TTL"]) == 7));
        let declined = read(404, "{\"code\":5,\"message\":\"lease not found\"}");
        assert!(matches!(declined, Err(Asked::Declined { code: NOT_FOUND, .. })));
        assert!(matches!(read(502, "<html>"), Err(Asked::Declined { code: 14, .. })));
        assert!(matches!(read(200, "x"), Err(Asked::Lost(_))));
    }
}
