//! The flags that every engine has.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::config::{DisaggregationMode, RuntimeConfig, WorkerConfig};

impl ValueEnum for DisaggregationMode {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Aggregated, Self::Prefill, Self::Decode, Self::Encode]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        let value = clap::builder::PossibleValue::new(self.slug());
        Some(if *self == Self::Aggregated { value.alias("aggregated") } else { value })
    }
}

/// Flags to put into an engine's own with `#[command(flatten)]`. A flag wins over its variable.
#[derive(Args, Clone, Debug)]
pub struct CommonArgs {
    /// First part of the endpoint's name
    #[arg(long, env = "DYN_NAMESPACE", default_value = "dynamo")]
    pub namespace: String,

    /// Second part of the endpoint's name
    #[arg(long, env = "DYN_COMPONENT", default_value = "backend")]
    pub component: String,

    /// Last part of the endpoint's name
    #[arg(long, env = "DYN_ENDPOINT", default_value = "generate")]
    pub endpoint: String,

    /// APIs of the model: chat, completions, ... in one list with commas
    #[arg(long, env = "DYN_ENDPOINT_TYPES", default_value = "chat,completions")]
    pub endpoint_types: String,

    /// Chat template in place of the model's own
    #[arg(long, env = "DYN_CUSTOM_JINJA_TEMPLATE")]
    pub custom_jinja_template: Option<PathBuf>,

    /// Format of the model's tool calls
    #[arg(long, env = "DYN_TOOL_CALL_PARSER")]
    pub dyn_tool_call_parser: Option<String>,

    /// Format of the model's reasoning
    #[arg(long, env = "DYN_REASONING_PARSER")]
    pub dyn_reasoning_parser: Option<String>,

    /// Leave tools out of the prompt for `tool_choice: none`
    #[arg(long, env = "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", default_value_t = true,
          action = clap::ArgAction::Set, value_parser = clap::builder::BoolishValueParser::new())]
    pub exclude_tools_when_tool_choice_none: bool,

    /// Part of a request that this worker serves
    #[arg(long, env = "DYN_DISAGGREGATION_MODE", value_enum, default_value_t = DisaggregationMode::Aggregated)]
    pub disaggregation_mode: DisaggregationMode,

    /// Send images and the like to an encode worker first
    #[arg(long, env = "DYN_ROUTE_TO_ENCODER")]
    pub route_to_encoder: bool,

    /// How workers and frontends find each other (file: one machine)
    #[arg(long, env = "DYN_DISCOVERY_BACKEND")]
    pub discovery_backend: Option<String>,

    /// How requests travel (tcp, nats)
    #[arg(long, env = "DYN_REQUEST_PLANE")]
    pub request_plane: Option<String>,

    /// How events travel (zmq, nats)
    #[arg(long, env = "DYN_EVENT_PLANE")]
    pub event_plane: Option<String>,
}

impl CommonArgs {
    /// Returns the configuration of a worker with these flags; an engine adds the names of its model.
    pub fn worker_config(&self) -> WorkerConfig {
        WorkerConfig {
            namespace: self.namespace.clone(),
            component: self.component.clone(),
            endpoint: self.endpoint.clone(),
            endpoint_types: self.endpoint_types.clone(),
            custom_jinja_template: self.custom_jinja_template.clone(),
            tool_call_parser: self.dyn_tool_call_parser.clone(),
            reasoning_parser: self.dyn_reasoning_parser.clone(),
            exclude_tools_when_tool_choice_none: self.exclude_tools_when_tool_choice_none,
            disaggregation_mode: self.disaggregation_mode,
            route_to_encoder: self.route_to_encoder,
            runtime: RuntimeConfig {
                discovery_backend: self.discovery_backend.clone(),
                request_plane: self.request_plane.clone(),
                event_plane: self.event_plane.clone(),
            },
            ..WorkerConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        common: CommonArgs,
    }

    #[test]
    fn the_defaults_of_the_flags_are_those_of_the_configuration() {
        let flags = Flags::parse_from(["engine"]);
        assert_eq!(flags.common.worker_config(), WorkerConfig::default());
    }

    #[test]
    fn flags_reach_the_configuration() {
        let flags = Flags::parse_from([
            "engine",
            "--disaggregation-mode",
            "aggregated",
            "--exclude-tools-when-tool-choice-none",
            "false",
            "--dyn-tool-call-parser",
            "hermes",
            "--discovery-backend",
            "file",
        ]);
        let config = flags.common.worker_config();
        assert!(!config.exclude_tools_when_tool_choice_none);
        assert_eq!(config.tool_call_parser.as_deref(), Some("hermes"));
        assert_eq!(config.runtime.discovery_backend.as_deref(), Some("file"));
    }

    #[test]
    fn a_switch_has_the_spellings_of_the_python_workers() {
        for (word, is_on) in [("1", true), ("on", true), ("yes", true), ("0", false), ("Off", false), ("no", false)] {
            let flags = Flags::parse_from(["engine", "--exclude-tools-when-tool-choice-none", word]);
            assert_eq!(flags.common.exclude_tools_when_tool_choice_none, is_on, "{word}");
        }
    }
}
