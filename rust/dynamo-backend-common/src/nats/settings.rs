//! Where NATS is, and how to get in: `NATS_*`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::error::DynamoError;
use crate::plane::tls_provider;
use crate::settings;
use crate::tls::{CallerTls, TlsConnector, TlsFile};

const SERVERS: &str = "NATS_SERVER";
const CA: &str = "NATS_TLS_CA_CERT_PATH";
const CERT: &str = "NATS_TLS_CLIENT_CERT_PATH";
const KEY: &str = "NATS_TLS_CLIENT_KEY_PATH";
const INSECURE: &str = "NATS_TLS_INSECURE";
const DEFAULT_PORT: u16 = 4222;

/// One server of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) host: String,
    pub(super) port: u16,
    has_tls: bool,
    user: Option<(String, String)>,
}

/// What a connection is made of.
pub(super) struct NatsSettings {
    pub(super) servers: Vec<Server>,
    pub(super) tls: Option<Box<dyn TlsConnector>>,
    pub(super) startup: Duration,
    identity: Identity,
}

/// How this process authenticates.
#[derive(Debug, PartialEq)]
enum Identity {
    User(String, String),
    Token(String),
    /// Nothing is set: the URL's user, or the one that the native system has.
    Default,
}

impl NatsSettings {
    /// Reads them. Fails, naming the variable, for what cannot be used.
    pub(super) fn from_env() -> Result<Self, DynamoError> {
        let servers = read_servers(&settings::text(SERVERS).unwrap_or_else(|| "localhost".to_owned()))?;
        let identity = Identity::read(settings::text)?;
        let tls = tls(settings::text, settings::switch(INSECURE, false), &servers)?;
        let startup = settings::float("NATS_STARTUP_CONNECT_TIMEOUT_SECONDS", 4.0, 0.1);
        let startup = Duration::try_from_secs_f64(startup).unwrap_or(Duration::MAX);
        Ok(Self { servers, tls, startup, identity })
    }

    /// Returns the servers, for people: without users and passwords.
    pub(super) fn address(&self) -> String {
        let urls: Vec<String> = self.servers.iter().map(Server::url).collect();
        urls.join(", ")
    }

    /// Returns what is sent to `server` first.
    pub(super) fn greeting(&self, server: &Server) -> Value {
        let mut greeting = json!({
            "verbose": false, "pedantic": false, "tls_required": self.tls.is_some(), "name": "dynamo", "lang": "rust",
            "version": env!("CARGO_PKG_VERSION"), "protocol": 1, "headers": true, "no_responders": false, "echo": false,
        });
        let (name, password) = match (&self.identity, &server.user) {
            (Identity::Token(token), _) => {
                greeting["auth_token"] = json!(token);
                return greeting;
            }
            (Identity::User(name, password), _) | (Identity::Default, Some((name, password))) => {
                (name.as_str(), password.as_str())
            }
            // A server without accounts ignores it.
            (Identity::Default, None) => ("user", "user"),
        };
        greeting["user"] = json!(name);
        greeting["pass"] = json!(password);
        greeting
    }
}

impl Identity {
    /// Of several ways the first one that is set counts.
    fn read(text: impl Fn(&str) -> Option<String>) -> Result<Self, DynamoError> {
        if let (Some(name), Some(password)) = (text("NATS_AUTH_USERNAME"), text("NATS_AUTH_PASSWORD")) {
            return Ok(Self::User(name, password));
        }
        if let Some(token) = text("NATS_AUTH_TOKEN") {
            return Ok(Self::Token(token));
        }
        if let Some(name) =
            ["NATS_AUTH_NKEY", "NATS_AUTH_CREDENTIALS_FILE"].into_iter().find(|name| text(name).is_some())
        {
            return Err(DynamoError::invalid(format!(
                "{name} is set, and the Rust SDK has no signatures: use NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD, or \
                 NATS_AUTH_TOKEN"
            )));
        }
        Ok(Self::Default)
    }
}

impl Server {
    fn url(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("{}://{host}:{}", if self.has_tls { "tls" } else { "nats" }, self.port)
    }

    fn read(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once("://").unwrap_or(("nats", text));
        let has_tls = match scheme {
            "nats" => false,
            "tls" => true,
            _ => return None,
        };
        let (user, rest) = match rest.rsplit_once('@') {
            None => (None, rest),
            Some((user, rest)) => {
                let (name, password) = user.split_once(':')?;
                (Some((name.to_owned(), password.to_owned())), rest)
            }
        };
        let rest = rest.trim_end_matches('/');
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']').map(|(host, port)| (host, port.strip_prefix(':')))?,
            None => rest.split_once(':').map_or((rest, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map_or(Some(DEFAULT_PORT), |port| port.parse().ok())?;
        (!host.is_empty()).then(|| Self { host: host.to_owned(), port, has_tls, user })
    }
}

fn read_servers(text: &str) -> Result<Vec<Server>, DynamoError> {
    let words: Vec<&str> = text.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    let read: Option<Vec<Server>> = words.iter().map(|word| Server::read(word)).collect();
    // Without the value, which may hold a password.
    read.filter(|servers| !servers.is_empty()).ok_or_else(|| {
        DynamoError::invalid(format!(
            "{SERVERS} is not a list of nats://HOST:PORT or tls://HOST:PORT with commas between them"
        ))
    })
}

fn tls(
    text: impl Fn(&str) -> Option<String>,
    is_insecure: bool,
    servers: &[Server],
) -> Result<Option<Box<dyn TlsConnector>>, DynamoError> {
    let file = |setting| text(setting).map(|path| TlsFile { setting, path: path.into() });
    let certificate = match (file(CERT), file(KEY)) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(DynamoError::invalid(format!("{CERT} and {KEY} need each other"))),
    };
    let caller = CallerTls { authority: file(CA), certificate, server_name: None, is_insecure };
    let named = [CA, CERT].into_iter().find(|name| text(name).is_some()).or(is_insecure.then_some(INSECURE));
    match named.or(servers.iter().any(|server| server.has_tls).then_some(SERVERS)) {
        None => Ok(None),
        Some(named) => tls_provider(named)?.connector(caller).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_urls_or_names() {
        let server = |host: &str, port| Server { host: host.into(), port, has_tls: false, user: None };
        let user = Some(("u".to_owned(), "p".to_owned()));
        let read = read_servers("nats://a, b:1,tls://u:p@[::1]:2/").expect("servers");
        assert_eq!(read, [server("a", 4222), server("b", 1), Server { has_tls: true, user, ..server("::1", 2) }]);
        assert_eq!(read[2].url(), "tls://[::1]:2");
        for wrong in ["http://a", "nats://", "a:b", "nats://u@a", ","] {
            assert!(read_servers(wrong).is_err_and(|why| why.to_string().contains(SERVERS)), "{wrong}");
        }
    }

    #[test]
    fn the_first_way_to_authenticate_that_is_whole_counts() {
        let read = |set: &[&str]| Identity::read(|name: &str| set.contains(&name).then(|| "x".to_owned()));
        let (user, password) = ("NATS_AUTH_USERNAME", "NATS_AUTH_PASSWORD");
        assert_eq!(read(&[]), Ok(Identity::Default));
        assert_eq!(read(&[user]), Ok(Identity::Default));
        assert_eq!(read(&[user, "NATS_AUTH_TOKEN"]), Ok(Identity::Token("x".into())));
        assert_eq!(read(&[user, password, "NATS_AUTH_NKEY"]), Ok(Identity::User("x".into(), "x".into())));
        for name in ["NATS_AUTH_NKEY", "NATS_AUTH_CREDENTIALS_FILE"] {
            assert!(read(&[name]).is_err_and(|why| why.to_string().contains(name)), "{name}");
        }
    }

    #[test]
    fn a_server_gets_the_url_s_user_only_where_none_is_set() {
        let servers = read_servers("nats://u:p@a,b").expect("servers");
        let settings =
            |identity| NatsSettings { servers: servers.clone(), tls: None, startup: Duration::ZERO, identity };
        let shown = |identity, server: usize| {
            let settings = settings(identity);
            let greeting = settings.greeting(&settings.servers[server]);
            [&greeting["user"], &greeting["pass"], &greeting["auth_token"]]
                .map(|value| value.as_str().unwrap_or("").to_owned())
        };
        assert_eq!(shown(Identity::Default, 0), ["u", "p", ""]);
        assert_eq!(shown(Identity::Default, 1), ["user", "user", ""]);
        assert_eq!(shown(Identity::Token("t".into()), 0), ["", "", "t"]);
        assert_eq!(shown(Identity::User("a".into(), "b".into()), 0), ["a", "b", ""]);
        assert_eq!(settings(Identity::Default).address(), "nats://a:4222, nats://b:4222");
    }
}
