//! Log lines on stderr: readable, or one JSON object each for a collector. `DYN_LOG` chooses what is logged.

use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{EnvFilter, LevelFilter, filter_fn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::settings;
use crate::telemetry::{self, CurrentTrace, ExportSettings, Exporter, REQUEST_TARGET, SpanLayer};

/// Starts logging, and the export of traces where that is asked for. In a process that already logs, its own logging stays.
pub(crate) fn init() {
    let directives = settings::text("DYN_LOG").unwrap_or_else(|| "info".to_owned());
    let (filter, complaint) = match EnvFilter::try_new(&directives) {
        Ok(filter) => (filter, None),
        Err(error) => {
            (EnvFilter::new("info"), Some(format!("DYN_LOG={directives} cannot be read ({error}); using info")))
        }
    };
    // The span of a request is no line of the log, and lines of every level are in it.
    let filter = match format!("{REQUEST_TARGET}=info").parse() {
        Ok(always) => filter.add_directive(always),
        Err(_) => filter,
    };
    // What cannot be exported ends the start, once that is checked.
    let settings = ExportSettings::from_env().ok().flatten();
    let exporter = settings.and_then(|settings| {
        let started = Exporter::start(settings);
        started.map_err(|error| eprintln!("no thread for the export of traces: {error}")).ok()
    });
    let is_json = wants_json();
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).event_format(Lines { is_json });
    let exports = exporter.is_some();
    let spans = filter_fn(move |metadata| metadata.is_span() && (exports || metadata.target() == REQUEST_TARGET));
    let spans = SpanLayer { exporter: exporter.clone() }.with_filter(spans.with_max_level_hint(LevelFilter::INFO));
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter)).with(spans);
    let is_first = tracing::subscriber::set_global_default(subscriber).is_ok();
    if is_first {
        telemetry::install(exporter, is_json);
    } else if let Some(exporter) = exporter {
        exporter.close(std::time::Duration::ZERO);
        tracing::warn!(
            "OTEL_EXPORT_ENABLED: this process logs through a subscriber of its own, and no trace is exported"
        );
    }
    if let (true, Some(complaint)) = (is_first, complaint) {
        tracing::warn!("{complaint}");
    }
}

fn wants_json() -> bool {
    match settings::text("DYN_LOGGING_CONSOLE_FORMAT") {
        Some(word) => word.trim().eq_ignore_ascii_case("jsonl"),
        None => settings::switch("DYN_LOGGING_JSONL", false),
    }
}

struct Lines {
    is_json: bool,
}

#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), json!(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), json!(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), json!(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), json!(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), json!(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), json!(value));
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let message = match fields.0.remove("message") {
            Some(Value::String(text)) => text,
            _ => String::new(),
        };
        let metadata = event.metadata();
        let time = rfc3339(SystemTime::now());
        if self.is_json {
            let mut line = Map::new();
            line.insert("time".into(), json!(time));
            line.insert("level".into(), json!(metadata.level().as_str()));
            line.insert("file".into(), json!(metadata.file()));
            line.insert("line".into(), json!(metadata.line()));
            line.insert("target".into(), json!(metadata.target()));
            line.insert("message".into(), json!(message));
            for span in context.event_scope().into_iter().flatten() {
                if let Some(trace) = span.extensions().get::<CurrentTrace>() {
                    put_trace(&mut line, trace, span.name());
                    break;
                }
            }
            line.extend(fields.0);
            return writeln!(writer, "{}", Value::Object(line));
        }
        let mut rest = String::new();
        for (name, value) in &fields.0 {
            match value {
                Value::String(text) => write!(rest, " {name}={text}")?,
                other => write!(rest, " {name}={other}")?,
            }
        }
        writeln!(writer, "{time} {:>5} {}: {message}{rest}", metadata.level().as_str(), metadata.target())
    }
}

/// Adds which request, trace and span a line is of.
fn put_trace(line: &mut Map<String, Value>, trace: &CurrentTrace, name: &str) {
    let companions = &trace.companions;
    line.insert("span_name".into(), json!(name));
    for (key, value) in [("request_id", &companions.request_id), ("x_request_id", &companions.x_request_id)] {
        if let Some(value) = value {
            line.insert(key.into(), json!(value));
        }
    }
    if let Some(context) = trace.distributed() {
        line.insert("trace_id".into(), json!(context.trace_id));
        line.insert("span_id".into(), json!(context.span_id));
        if let Some(parent_id) = context.parent_id {
            line.insert("parent_id".into(), json!(parent_id));
        }
    }
}

/// Writes a time as `2026-01-31T23:59:59.123456Z`.
fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days as i64);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z", since.subsec_micros())
}

/// Returns the date of a day counted from 1970 on. A year is counted from March, so that its leap day is the last one.
fn civil(days: i64) -> (i64, i64, i64) {
    let since_0000 = days + 719_468;
    let era = since_0000.div_euclid(146_097);
    let of_era = since_0000.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_written_as_others_read_them() {
        let at = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000Z");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59.000000Z");
    }
}
