//! From a model's files and an engine's figures to the card that frontends serve it by.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::config::WorkerConfig;
use crate::config::{DisaggregationMode, EngineConfig, StructuralTagMode, StructuralTagSchema, StructuralTagScope};
use crate::error::DynamoError;
use crate::hash::{blake3::Hasher, hex};

/// The card's block size when the engine has no blocks: readers want a number.
const DEFAULT_BLOCK_SIZE: u32 = 16;
const CONTEXT_KEYS: [&str; 5] =
    ["max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len"];

/// One file of a model, and the name under which it may be served to other machines.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CardFile {
    pub(crate) path: PathBuf,
    pub(crate) member: &'static str,
    pub(crate) kind: &'static str,
    is_template: bool,
    is_custom: bool,
    checksum: String,
    size: u64,
}

impl CardFile {
    fn read(path: &Path, member: &'static str, kind: &'static str) -> Result<Self, DynamoError> {
        let unreadable =
            |error: io::Error| DynamoError::invalid(format!("model file {} cannot be read: {error}", path.display()));
        let path = std::path::absolute(path).map_err(unreadable)?;
        let (checksum, size) = checksum_of(&path).map_err(unreadable)?;
        let is_template = member == "chat_template_file";
        Ok(Self { path, member, kind, is_template, is_custom: false, checksum, size })
    }

    /// Returns the card's record of this file at `place`, its own path or where it is served.
    fn record(&self, place: &str) -> Value {
        let file = json!({"path": place, "checksum": self.checksum, "size": self.size});
        if self.is_template { json!({"is_custom": self.is_custom, "file": file}) } else { file }
    }
}

fn checksum_of(path: &Path) -> io::Result<(String, u64)> {
    let mut file = File::open(path)?;
    let mut hasher = Hasher::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut size = 0;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok((format!("blake3:{}", hex(&hasher.finish())), size));
        }
        hasher.update(&buffer[..count]);
        size += count as u64;
    }
}

/// What a model directory holds. Empty for a mere name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Assets {
    pub(crate) files: Vec<CardFile>,
    architectural_context_length: Option<u32>,
    legacy_context_length: Option<u32>,
}

impl Assets {
    /// Reads the files behind a path, and nothing for a mere name. Fails for a path without a model.
    pub(crate) fn find(name: &str) -> Result<Self, DynamoError> {
        let path = Path::new(name);
        if name.is_empty() {
            return Ok(Self::default());
        }
        if !path.exists() {
            if name.starts_with(['/', '.', '~']) {
                return Err(DynamoError::invalid(format!("model path {name:?} does not exist")));
            }
            if name.starts_with("hub:") {
                return Err(DynamoError::invalid(format!(
                    "the Rust SDK does not fetch models: fetch {name:?} first and give its directory"
                )));
            }
            tracing::info!(
                "Model {name:?} is a name only: the frontend will use the built-in byte tokenizer and a plain template. \
                 For the real ones give a local directory."
            );
            return Ok(Self::default());
        }
        Self::read(path)
    }

    fn read(directory: &Path) -> Result<Self, DynamoError> {
        if !directory.is_dir() {
            let text = format!("model path {:?} is not a directory", directory.display().to_string());
            return Err(DynamoError::invalid(text));
        }
        let mut files = vec![tokenizer_of(directory)?];
        for (member, kind, name) in [
            ("model_info", "hf_config_json", "config.json"),
            ("prompt_formatter", "hf_tokenizer_config_json", "tokenizer_config.json"),
            ("gen_config", "hf_generation_config_json", "generation_config.json"),
        ] {
            if directory.join(name).is_file() {
                files.push(CardFile::read(&directory.join(name), member, kind)?);
            }
        }
        for (kind, name) in
            [("hf_chat_template_jinja", "chat_template.jinja"), ("hf_chat_template_json", "chat_template.json")]
        {
            if directory.join(name).is_file() {
                files.push(CardFile::read(&directory.join(name), "chat_template_file", kind)?);
                break;
            }
        }
        let config = read_json(&directory.join("config.json"))?;
        let of_text = config.get("text_config").cloned().unwrap_or(Value::Null);
        let architectural_context_length = [&config, &of_text]
            .into_iter()
            .flat_map(|source| CONTEXT_KEYS.iter().map(move |key| &source[*key]))
            .find_map(plausible);
        let tokenizer = read_json(&directory.join("tokenizer_config.json"))?;
        let legacy_context_length = plausible(&tokenizer["model_max_length"]);
        Ok(Self { files, architectural_context_length, legacy_context_length })
    }

    /// Replaces the model's chat template.
    pub(crate) fn use_template(&mut self, path: &Path) -> Result<(), DynamoError> {
        if !path.is_file() {
            let text = format!("custom_jinja_template {:?} is not a readable file", path.display().to_string());
            return Err(DynamoError::invalid(text));
        }
        self.files.retain(|file| !file.is_template);
        let mut file = CardFile::read(path, "chat_template_file", "hf_chat_template_jinja")?;
        file.is_custom = true;
        self.files.push(file);
        Ok(())
    }
}

fn tokenizer_of(directory: &Path) -> Result<CardFile, DynamoError> {
    let json = directory.join("tokenizer.json");
    if json.is_file() {
        return CardFile::read(&json, "tokenizer", "hf_tokenizer_json");
    }
    let mut found: Vec<PathBuf> = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "tiktoken"))
        .collect();
    found.sort();
    let model = directory.join("tiktoken.model");
    let first = model.is_file().then_some(model).or_else(|| found.into_iter().next());
    match first {
        Some(path) => CardFile::read(&path, "tokenizer", "tik_token_model"),
        None => Err(DynamoError::invalid(format!(
            "model directory {:?} has neither tokenizer.json nor a tiktoken model",
            directory.display().to_string()
        ))),
    }
}

fn read_json(path: &Path) -> Result<Value, DynamoError> {
    if !path.is_file() {
        return Ok(json!({}));
    }
    let read = std::fs::read(path).map_err(anyhow::Error::from);
    let value = read.and_then(|bytes| Ok(serde_json::from_slice::<Value>(&bytes)?));
    match value {
        Ok(value) if value.is_object() => Ok(value),
        Ok(_) => Err(DynamoError::invalid(format!("model file {} is not a JSON object", path.display()))),
        Err(error) => Err(DynamoError::invalid(format!("model file {} is not JSON: {error}", path.display()))),
    }
}

/// Takes a length that can be one: tokenizers write 1e30 for "no limit".
fn plausible(value: &Value) -> Option<u32> {
    let number = value.as_f64().filter(|number| *number >= 1.0 && *number <= f64::from(u32::MAX))?;
    Some(number as u32)
}

/// Returns the form of a name that keys and addresses use.
pub(crate) fn slug(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for letter in name.to_lowercase().chars() {
        let is_plain = letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_' || letter == '-';
        text.push(if is_plain { letter } else { '_' });
    }
    text.trim_start_matches('_').to_owned()
}

/// Returns the name under which clients know the model.
pub(crate) fn served_name(config: &WorkerConfig, engine: &EngineConfig) -> String {
    [&config.served_model_name, &engine.served_model_name]
        .into_iter()
        .flatten()
        .find(|name| !name.is_empty())
        .unwrap_or(&engine.model)
        .clone()
}

/// Builds the card. `place` says where a file is found: its path, or where it is served.
pub(crate) fn card(
    config: &WorkerConfig,
    engine: &EngineConfig,
    assets: &Assets,
    place: impl Fn(&CardFile) -> String,
) -> Result<Value, DynamoError> {
    let name = served_name(config, engine);
    if name.is_empty() {
        let text = "a model needs a name: set EngineConfig.model or a served model name";
        return Err(DynamoError::invalid(text));
    }
    let source = if config.model_name.is_empty() { &engine.model } else { &config.model_name };
    let context_length =
        engine.context_length.or(assets.architectural_context_length).or(assets.legacy_context_length).unwrap_or(0);
    let mut card = Map::new();
    card.insert("display_name".into(), json!(name));
    card.insert("slug".into(), json!(slug(&name)));
    card.insert("source_path".into(), json!(source));
    for file in &assets.files {
        card.insert(file.member.into(), json!({file.kind: file.record(&place(file))}));
    }
    if let Some(length) = assets.architectural_context_length {
        card.insert("architectural_max_context_length".into(), json!(length));
    }
    card.insert("context_length".into(), json!(context_length));
    card.insert("kv_cache_block_size".into(), json!(engine.kv_cache_block_size.unwrap_or(DEFAULT_BLOCK_SIZE)));
    card.insert("migration_limit".into(), json!(0));
    card.insert("model_type".into(), json!(config.model_type()?));
    card.insert("model_input".into(), json!(format!("{:?}", config.model_input)));
    card.insert("worker_type".into(), json!(config.disaggregation_mode.role()));
    card.insert("needs".into(), needs(config));
    card.insert("media_decoder".into(), Value::Null);
    card.insert("media_fetcher".into(), Value::Null);
    let aliases: Vec<&String> = engine.model_aliases.iter().filter(|alias| **alias != name).collect();
    if !aliases.is_empty() {
        card.insert("aliases".into(), json!(aliases));
    }
    card.insert("runtime_config".into(), runtime_config(config, engine));
    Ok(Value::Object(card))
}

fn needs(config: &WorkerConfig) -> Value {
    match (config.disaggregation_mode, config.route_to_encoder) {
        (DisaggregationMode::Aggregated, false) => json!([]),
        (DisaggregationMode::Aggregated, true) => json!([["encode"]]),
        (DisaggregationMode::Prefill, false) => json!([["decode"]]),
        (DisaggregationMode::Prefill, true) => json!([["decode", "encode"]]),
        (DisaggregationMode::Decode, _) => json!([["prefill"]]),
        (DisaggregationMode::Encode, _) => json!([["prefill", "decode"], ["aggregated"]]),
    }
}

fn runtime_config(config: &WorkerConfig, engine: &EngineConfig) -> Value {
    let mode = config.disaggregation_mode;
    let is_prefill = mode == DisaggregationMode::Prefill;
    let mut record = Map::new();
    let mut set = |name: &str, value: Value| {
        if !value.is_null() {
            record.insert(name.into(), value);
        }
    };
    set("context_length", json!(engine.context_length));
    set("total_kv_blocks", json!(engine.total_kv_blocks));
    set("max_num_seqs", json!(engine.max_num_seqs));
    set("max_num_batched_tokens", json!(engine.max_num_batched_tokens));
    // A prefill worker's output is never taken apart.
    set("tool_call_parser", json!(config.tool_call_parser.as_ref().filter(|_| !is_prefill)));
    set("reasoning_parser", json!(config.reasoning_parser.as_ref().filter(|_| !is_prefill)));
    set("tool_call_arguments_format", json!("json_string"));
    set(
        "structural_tag_mode",
        json!(match config.structural_tag_mode {
            StructuralTagMode::Off => "off",
            StructuralTagMode::On => "on",
        }),
    );
    set(
        "structural_tag_scope",
        json!(match config.structural_tag_scope {
            StructuralTagScope::Auto => "auto",
            StructuralTagScope::Always => "always",
        }),
    );
    set(
        "structural_tag_schema",
        json!(match config.structural_tag_schema {
            StructuralTagSchema::Auto => "auto",
            StructuralTagSchema::Strict => "strict",
        }),
    );
    set("exclude_tools_when_tool_choice_none", json!(config.exclude_tools_when_tool_choice_none));
    set("data_parallel_start_rank", json!(engine.data_parallel_start_rank.unwrap_or(0)));
    set("data_parallel_size", json!(engine.data_parallel_size.unwrap_or(1)));
    set("enable_local_indexer", json!(config.has_local_indexer()));
    set("enable_eagle", json!(false));
    let mut data: Map<String, Value> =
        engine.runtime_data.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    if let Some(mode) = &config.default_thinking_mode {
        data.insert("default_thinking_mode".into(), json!(mode));
    }
    if !data.is_empty() {
        set("runtime_data", Value::Object(data));
    }
    if let (Some(host), Some(port)) = (&engine.bootstrap_host, engine.bootstrap_port) {
        set("disaggregated_endpoint", json!({"bootstrap_host": host, "bootstrap_port": port}));
    }
    Value::Object(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_only_card_has_what_a_frontend_needs() {
        let engine = EngineConfig { model: "/a/M.1".into(), context_length: Some(99), ..Default::default() };
        let card = card(&WorkerConfig::default(), &engine, &Assets::default(), |_| String::new()).expect("a card");
        assert_eq!(card["slug"], "a_m_1");
        assert_eq!(card["model_type"], "Chat | Completions");
        assert_eq!(card["context_length"], 99);
        assert_eq!(card["runtime_config"]["data_parallel_size"], 1);
        assert!(card.get("tokenizer").is_none());
    }

    #[test]
    fn roles_need_each_other() {
        let of = |mode| {
            let config = WorkerConfig {
                disaggregation_mode: mode,
                tool_call_parser: Some("hermes".into()),
                ..Default::default()
            };
            let engine = EngineConfig { model: "m".into(), ..Default::default() };
            card(&config, &engine, &Assets::default(), |_| String::new()).expect("a card")
        };
        let prefill = of(DisaggregationMode::Prefill);
        assert_eq!((&prefill["model_type"], &prefill["needs"]), (&json!("Prefill"), &json!([["decode"]])));
        assert!(prefill["runtime_config"].get("tool_call_parser").is_none());
        let decode = of(DisaggregationMode::Decode);
        assert_eq!(decode["runtime_config"]["enable_local_indexer"], false);
        assert_eq!(of(DisaggregationMode::Encode)["model_type"], "");
    }

    #[test]
    fn a_path_without_a_model_is_an_error_that_names_it() {
        assert!(Assets::find("/no/such/model").expect_err("an error").to_string().contains("/no/such/model"));
        assert!(Assets::find("hub:some/model").is_err());
        assert_eq!(Assets::find("just-a-name").expect("a name"), Assets::default());
    }
}
