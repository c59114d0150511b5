//! What an operator sets for the export of traces: the variables of OpenTelemetry, as far as this SDK has them.

use std::time::Duration;

use crate::error::DynamoError;
use crate::settings;

const DEFAULT_ENDPOINT: &str = "http://localhost:4318";
const TRACES_PATH: &str = "/v1/traces";

/// Which traces that begin here are exported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sampler {
    /// A trace of a caller goes by what its caller decided.
    is_parent_based: bool,
    ratio: f64,
}

impl Sampler {
    pub(crate) const ALWAYS: Self = Self { is_parent_based: true, ratio: 1.0 };

    fn named(name: &str, ratio: f64) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let (kind, is_parent_based) = name.strip_prefix("parentbased_").map_or((&*name, false), |kind| (kind, true));
        let ratio = match kind {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => ratio.clamp(0.0, 1.0),
            _ => return None,
        };
        Some(Self { is_parent_based, ratio })
    }

    /// Returns whether a trace is exported; `has_caller`: its caller has sampled it.
    pub(crate) fn samples(self, trace_id: u128, has_caller: bool) -> bool {
        if has_caller && self.is_parent_based || self.ratio >= 1.0 {
            return true;
        }
        // The rule of OpenTelemetry, so that every process decides alike about one trace.
        ((trace_id as u64) as f64) < self.ratio * 2f64.powi(64)
    }
}

/// Where spans go, and how.
#[derive(Clone, Debug)]
pub(crate) struct ExportSettings {
    /// HOST:PORT.
    pub(crate) endpoint: String,
    pub(crate) path: String,
    /// Lines that end with CR LF.
    pub(crate) headers: String,
    /// Attributes of the resource: what this process is.
    pub(crate) resource: Vec<(String, String)>,
    pub(crate) sampler: Sampler,
    pub(crate) delay: Duration,
    pub(crate) queue: usize,
    pub(crate) batch: usize,
}

impl ExportSettings {
    /// Reads the settings; `None`: nothing is exported. Fails, naming the variable, for what this SDK does not have.
    pub(crate) fn from_env() -> Result<Option<Self>, DynamoError> {
        if !settings::switch("OTEL_EXPORT_ENABLED", false) {
            return Ok(None);
        }
        let (variable, protocol) = first(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]);
        if let Some(protocol) = protocol.filter(|protocol| protocol.trim() != "http/protobuf") {
            return Err(DynamoError::invalid(format!(
                "{variable}={protocol} is not built into the Rust SDK: set it to http/protobuf, and the endpoint to the \
                 port of the collector for it (4318)"
            )));
        }
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", settings::text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"));
        let (variable, url) = match own {
            (variable, Some(url)) => (variable, url),
            (_, None) => {
                let base = settings::text("OTEL_EXPORTER_OTLP_ENDPOINT");
                let base = base.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
                ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("{}{TRACES_PATH}", base.trim().trim_end_matches('/')))
            }
        };
        let (endpoint, path) = split_url(url.trim())
            .map_err(|why| DynamoError::invalid(format!("{variable}: {url:?} {why}; expected http://HOST:4318")))?;
        let (variable, given) = first(["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"]);
        let headers = pairs(&given.unwrap_or_default());
        let is_plain = |(name, value): &(String, String)| !format!("{name}{value}").contains(['\r', '\n']);
        if !headers.iter().all(is_plain) {
            return Err(DynamoError::invalid(format!("{variable} has a line break, which no header can have")));
        }
        let mut resource = pairs(&settings::text("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default());
        if let Some(name) = settings::text("OTEL_SERVICE_NAME") {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".into(), name));
        } else if !resource.iter().any(|(key, _)| key == "service.name") {
            resource.push(("service.name".into(), "dynamo".into()));
        }
        let milliseconds = |name, default: i64, minimum| {
            Duration::from_millis(settings::integer(name, default, minimum).unsigned_abs())
        };
        let count = |name, default: i64| usize::try_from(settings::integer(name, default, 1)).unwrap_or(usize::MAX);
        let queue = count("OTEL_BSP_MAX_QUEUE_SIZE", 2048);
        Ok(Some(Self {
            endpoint,
            path,
            headers: headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect(),
            resource,
            sampler: sampler(),
            delay: milliseconds("OTEL_BSP_SCHEDULE_DELAY", 5000, 1),
            queue,
            batch: count("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512).min(queue),
        }))
    }
}

/// Returns the first variable that is set, or the last one's name.
fn first<const N: usize>(names: [&'static str; N]) -> (&'static str, Option<String>) {
    let found = names.into_iter().find_map(|name| settings::text(name).map(|value| (name, Some(value))));
    found.unwrap_or((names[N - 1], None))
}

fn sampler() -> Sampler {
    let ratio = settings::float("OTEL_TRACES_SAMPLER_ARG", 1.0, 0.0);
    if let Some(name) = settings::text("OTEL_TRACES_SAMPLER") {
        return Sampler::named(name.trim(), ratio).unwrap_or_else(|| {
            tracing::warn!("OTEL_TRACES_SAMPLER={name} is not the name of a sampler; every trace is sampled");
            Sampler::ALWAYS
        });
    }
    match settings::text("OTEL_TRACES_SAMPLE_RATIO") {
        Some(_) => Sampler { ratio: settings::float("OTEL_TRACES_SAMPLE_RATIO", 1.0, 0.0).min(1.0), ..Sampler::ALWAYS },
        None => Sampler::ALWAYS,
    }
}

/// Returns HOST:PORT and the path of a URL, or what is wrong with it.
fn split_url(url: &str) -> Result<(String, String), &'static str> {
    let rest = match url.split_once("://") {
        Some(("http", rest)) => rest,
        Some(("https", _)) => return Err("asks for TLS, which the export of traces in Rust does not have"),
        Some(_) => return Err("is not a URL of HTTP"),
        None => url,
    };
    let (host, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-._:[]".contains(letter);
    if host.is_empty() || !host.chars().all(is_plain) || path.contains([' ', '\r', '\n']) {
        return Err("is not a URL of HTTP");
    }
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.is_empty() && !port.ends_with(']'));
    Ok((if has_port { host.to_owned() } else { format!("{host}:80") }, path.to_owned()))
}

/// Reads `key=value,key=value`, whose values are percent-encoded; pairs without `=` are left out.
fn pairs(text: &str) -> Vec<(String, String)> {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.trim().to_owned(), percent_decoded(value.trim()))).collect()
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = tail.get(..2).filter(|_| *first == b'%').and_then(|two| std::str::from_utf8(two).ok());
        match code.and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_collectors_are_read_and_tls_is_named() {
        let of = |url| split_url(url).map(|(host, path)| format!("{host} {path}"));
        assert_eq!(of("http://collector:4318/v1/traces"), Ok("collector:4318 /v1/traces".into()));
        assert_eq!(of("[::1]:4318"), Ok("[::1]:4318 /".into()));
        assert_eq!(of("http://[::1]/x"), Ok("[::1]:80 /x".into()));
        assert!(of("https://collector").is_err_and(|why| why.contains("TLS")));
        for wrong in ["", "ftp://a", "http://a b", "http:///x"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn samplers_have_the_names_and_the_rule_of_opentelemetry() {
        let half = Sampler::named("TraceIdRatio", 0.5).expect("a sampler");
        assert!(half.samples(1, false) && !half.samples(u128::from(u64::MAX), true));
        let parent = Sampler::named("parentbased_always_off", 1.0).expect("a sampler");
        assert!(parent.samples(7, true) && !parent.samples(7, false));
        assert_eq!(Sampler::named("sometimes", 1.0), None);
    }

    #[test]
    fn lists_of_pairs_are_percent_encoded() {
        let found = pairs("authorization=Bearer%20a%2Cb, x = 1%,wrong");
        assert_eq!(found, [("authorization".into(), "Bearer a,b".into()), ("x".into(), "1%".to_owned())]);
    }
}
