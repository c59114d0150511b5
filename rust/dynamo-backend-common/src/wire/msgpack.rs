//! The little of MessagePack that every token pays for, and a measure of what a message takes once it is decoded.

/// Appends a whole number in its shortest form.
pub(crate) fn put_uint(out: &mut Vec<u8>, value: u64) {
    if value < 0x80 {
        out.push(value as u8);
    } else if value <= 0xff {
        out.extend_from_slice(&[0xcc, value as u8]);
    } else if value <= 0xffff {
        out.push(0xcd);
        out.extend_from_slice(&(value as u16).to_be_bytes());
    } else if value <= 0xffff_ffff {
        out.push(0xce);
        out.extend_from_slice(&(value as u32).to_be_bytes());
    } else {
        out.push(0xcf);
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// Appends the head of an array.
pub(crate) fn put_array(out: &mut Vec<u8>, length: usize) {
    if length < 16 {
        out.push(0x90 | length as u8);
    } else if length <= 0xffff {
        out.push(0xdc);
        out.extend_from_slice(&(length as u16).to_be_bytes());
    } else {
        out.push(0xdd);
        out.extend_from_slice(&(length as u32).to_be_bytes());
    }
}

/// Appends the head of a map.
pub(crate) fn put_map(out: &mut Vec<u8>, length: usize) {
    if length < 16 {
        out.push(0x80 | length as u8);
    } else if length <= 0xffff {
        out.push(0xde);
        out.extend_from_slice(&(length as u16).to_be_bytes());
    } else {
        out.push(0xdf);
        out.extend_from_slice(&(length as u32).to_be_bytes());
    }
}

/// Appends a text.
pub(crate) fn put_str(out: &mut Vec<u8>, text: &str) {
    let length = text.len();
    if length < 32 {
        out.push(0xa0 | length as u8);
    } else if length <= 0xff {
        out.extend_from_slice(&[0xd9, length as u8]);
    } else if length <= 0xffff {
        out.push(0xda);
        out.extend_from_slice(&(length as u16).to_be_bytes());
    } else {
        out.push(0xdb);
        out.extend_from_slice(&(length as u32).to_be_bytes());
    }
    out.extend_from_slice(text.as_bytes());
}

/// Appends bytes.
pub(crate) fn put_bin(out: &mut Vec<u8>, bytes: &[u8]) {
    let length = bytes.len();
    if length <= 0xff {
        out.extend_from_slice(&[0xc4, length as u8]);
    } else if length <= 0xffff {
        out.push(0xc5);
        out.extend_from_slice(&(length as u16).to_be_bytes());
    } else {
        out.push(0xc6);
        out.extend_from_slice(&(length as u32).to_be_bytes());
    }
    out.extend_from_slice(bytes);
}

/// Appends nil.
pub(crate) fn put_nil(out: &mut Vec<u8>) {
    out.push(0xc0);
}

/// Why a message is not decoded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It takes more memory than allowed.
    TooLarge,
    /// It nests deeper than allowed.
    TooDeep,
    /// It ends too early, or has a byte that begins no value.
    Malformed,
}

/// How deep a message may nest.
const MAX_DEPTH: usize = 128;
/// What one value takes in memory, at most, beside the bytes of its text.
const VALUE_BYTES: usize = 80;
/// What one token of the prompt takes.
const TOKEN_BYTES: usize = 8;

/// Walks over a message without decoding it, and refuses one that would take more than `limit` bytes of memory.
///
/// An array of empty arrays has one byte on the wire for each of them, and dozens in memory. The prompt is a plain list of
/// numbers and counts for what that takes. Returns whether the message has one.
pub(crate) fn check_size(message: &[u8], limit: usize) -> Result<bool, Refusal> {
    let mut walk = Walk { rest: message, total: 0, limit };
    // What is still to come on each level: values, and whether they are the numbers of the prompt.
    let mut levels: Vec<(usize, bool)> = vec![(1, false)];
    let (mut prompt_next, mut has_prompt) = (false, false);
    while let Some((left, in_prompt)) = levels.last_mut() {
        if *left == 0 {
            levels.pop();
            continue;
        }
        *left -= 1;
        let is_prompt = std::mem::take(&mut prompt_next);
        let cost = if *in_prompt { TOKEN_BYTES } else { VALUE_BYTES };
        let is_member = levels.len() == 2;
        match walk.value(cost)? {
            Value::Scalar => {}
            Value::Text(text) => {
                prompt_next = is_member && text == b"token_ids";
                has_prompt |= prompt_next;
            }
            Value::Container(length) => {
                if levels.len() >= MAX_DEPTH {
                    return Err(Refusal::TooDeep);
                }
                levels.push((length, is_prompt));
            }
        }
    }
    if walk.rest.is_empty() { Ok(has_prompt) } else { Err(Refusal::Malformed) }
}

enum Value<'a> {
    Scalar,
    Text(&'a [u8]),
    Container(usize),
}

struct Walk<'a> {
    rest: &'a [u8],
    total: usize,
    limit: usize,
}

impl<'a> Walk<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Refusal> {
        if count > self.rest.len() {
            return Err(Refusal::Malformed);
        }
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self, width: usize) -> Result<usize, Refusal> {
        Ok(self.take(width)?.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    fn spend(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.total = self.total.saturating_add(bytes);
        if self.total > self.limit { Err(Refusal::TooLarge) } else { Ok(()) }
    }

    fn blob(&mut self, length: usize) -> Result<&'a [u8], Refusal> {
        self.spend(length)?;
        self.take(length)
    }

    fn value(&mut self, cost: usize) -> Result<Value<'a>, Refusal> {
        self.spend(cost)?;
        let tag = self.take(1)?[0];
        let fixed = match tag {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => 0,
            0x80..=0x8f => return Ok(Value::Container(usize::from(tag & 15) * 2)),
            0x90..=0x9f => return Ok(Value::Container(usize::from(tag & 15))),
            0xa0..=0xbf => return Ok(Value::Text(self.blob(usize::from(tag & 31))?)),
            0xcc | 0xd0 => 1,
            0xcd | 0xd1 => 2,
            0xca | 0xce | 0xd2 => 4,
            0xcb | 0xcf | 0xd3 => 8,
            0xd4..=0xd8 => 1 + (1 << (tag - 0xd4)),
            0xc4..=0xc6 => {
                let length = self.number(1 << (tag - 0xc4))?;
                self.blob(length)?;
                return Ok(Value::Scalar);
            }
            0xc7..=0xc9 => {
                let length = self.number(1 << (tag - 0xc7))? + 1;
                self.blob(length)?;
                return Ok(Value::Scalar);
            }
            0xd9..=0xdb => {
                let length = self.number(1 << (tag - 0xd9))?;
                return Ok(Value::Text(self.blob(length)?));
            }
            0xdc | 0xdd => return Ok(Value::Container(self.number(2 << (tag - 0xdc))?)),
            0xde | 0xdf => return Ok(Value::Container(self.number(2 << (tag - 0xde))? * 2)),
            0xc1 => return Err(Refusal::Malformed),
        };
        self.take(fixed)?;
        Ok(Value::Scalar)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn packed(value: &serde_json::Value) -> Vec<u8> {
        rmp_serde::to_vec_named(value).expect("msgpack")
    }

    #[test]
    fn numbers_arrays_and_texts_are_as_any_reader_expects() {
        for number in [0u64, 127, 128, 255, 256, 65535, 65536, u64::from(u32::MAX), u64::MAX] {
            let mut out = Vec::new();
            put_uint(&mut out, number);
            assert_eq!(rmp_serde::from_slice::<u64>(&out).expect("a number"), number);
        }
        for length in [0, 31, 32, 255, 256, 65536] {
            let mut out = Vec::new();
            put_str(&mut out, &"x".repeat(length));
            assert_eq!(rmp_serde::from_slice::<String>(&out).expect("a text").len(), length);
        }
        for length in [0, 15, 16, 65536] {
            let mut out = Vec::new();
            put_array(&mut out, length);
            out.resize(out.len() + length, 0xc0);
            let list: Vec<Option<u8>> = rmp_serde::from_slice(&out).expect("a list");
            assert_eq!(list.len(), length);
        }
    }

    #[test]
    fn ordinary_messages_pass() {
        let body =
            json!({"token_ids": [1, 300, 70000], "a": {"b": [null, true, -5, 1.5, "text"]}, "c": "x".repeat(300)});
        assert_eq!(check_size(&packed(&body), 4096), Ok(true));
        assert_eq!(check_size(&packed(&json!({"a": {"token_ids": []}})), 4096), Ok(false));
    }

    #[test]
    fn what_grows_in_memory_is_refused() {
        let empty_arrays = json!({"a": vec![json!([]); 1000]});
        assert_eq!(check_size(&packed(&empty_arrays), 10_000), Err(Refusal::TooLarge));
        let prompt = json!({"token_ids": vec![7; 1000]});
        assert_eq!(check_size(&packed(&prompt), 10_000), Ok(true));
        let hidden = json!({"a": {"token_ids": vec![7; 1000]}});
        assert_eq!(check_size(&packed(&hidden), 10_000), Err(Refusal::TooLarge));
    }

    #[test]
    fn depth_and_truncation_are_refused() {
        assert_eq!(check_size(&[0x91; 200], 1 << 20), Err(Refusal::TooDeep));
        assert_eq!(check_size(&[0xdd, 0xff, 0xff, 0xff, 0xff, 0xc0], 1 << 20), Err(Refusal::Malformed));
        assert_eq!(check_size(&[0xc1], 1 << 20), Err(Refusal::Malformed));
        assert_eq!(check_size(&[0xc0, 0xc0], 1 << 20), Err(Refusal::Malformed));
        assert_eq!(check_size(&[], 1 << 20), Err(Refusal::Malformed));
    }
}
