//! The items of many streams on their way out: each is encoded as it is made, and all that is there leaves in one frame.

use super::frames::{END_FLAG, HEADER_BYTES, MAX_PAYLOAD, head, kind};
use super::msgpack::{put_array, put_nil, put_str, put_uint};

/// The index of the item that ends a stream, as MessagePack writes it.
const END_INDEX: u8 = 0xfe;
/// The index of an item that is an object, as MessagePack writes it.
const OBJECT_INDEX: u8 = 0xff;
/// The head of an array whose length is filled in later.
const ARRAY_HEAD_BYTES: usize = 3;
const MAX_ITEMS: usize = 0xffff;

/// One chunk of one stream.
pub(crate) struct Chunk<'a> {
    pub(crate) stream: u32,
    pub(crate) index: u32,
    /// Tokens of this choice that were sent before.
    pub(crate) offset: u64,
    pub(crate) token_ids: &'a [u32],
    pub(crate) finish_reason: Option<&'a str>,
    /// A map in MessagePack; empty: there is none.
    pub(crate) extra: &'a [u8],
}

/// Frames under construction: the last one is open until another item does not fit, or until they are taken.
#[derive(Debug, Default)]
pub(crate) struct ItemBatch {
    bytes: Vec<u8>,
    frame_start: usize,
    count: usize,
}

impl ItemBatch {
    /// Returns how many bytes wait.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Adds a chunk.
    pub(crate) fn chunk(&mut self, chunk: &Chunk<'_>) {
        let start = self.open();
        let out = &mut self.bytes;
        let has_extra = !chunk.extra.is_empty();
        let members = if has_extra { 6 } else { 4 + usize::from(chunk.finish_reason.is_some()) };
        put_array(out, members);
        put_uint(out, u64::from(chunk.stream));
        put_uint(out, u64::from(chunk.index));
        put_uint(out, chunk.offset);
        put_array(out, chunk.token_ids.len());
        for id in chunk.token_ids {
            put_uint(out, u64::from(*id));
        }
        if members > 4 {
            match chunk.finish_reason {
                Some(word) => put_str(out, word),
                None => put_nil(out),
            }
        }
        if has_extra {
            out.extend_from_slice(chunk.extra);
        }
        self.added(start, chunk.stream);
    }

    /// Adds an object, in MessagePack; `cost` is what it takes of the stream's credit.
    pub(crate) fn object(&mut self, stream: u32, cost: u64, object: &[u8]) {
        let start = self.open();
        let out = &mut self.bytes;
        put_array(out, 6);
        put_uint(out, u64::from(stream));
        out.push(OBJECT_INDEX);
        put_uint(out, cost);
        put_array(out, 0);
        put_nil(out);
        out.extend_from_slice(object);
        self.added(start, stream);
    }

    /// Adds the end of a stream; `error` is its record in MessagePack, empty for a clean end.
    pub(crate) fn end(&mut self, stream: u32, total: u64, error: &[u8]) {
        let start = self.open();
        let out = &mut self.bytes;
        put_array(out, if error.is_empty() { 4 } else { 6 });
        put_uint(out, u64::from(stream));
        out.push(END_INDEX);
        put_uint(out, total);
        put_array(out, 0);
        if !error.is_empty() {
            put_nil(out);
            out.extend_from_slice(error);
        }
        self.added(start, stream);
    }

    /// Takes all frames, in place of which `into` becomes the next buffer.
    pub(crate) fn take(&mut self, into: &mut Vec<u8>) {
        self.close();
        into.clear();
        std::mem::swap(&mut self.bytes, into);
        self.frame_start = 0;
    }

    /// Opens a frame unless one is open, and returns where the next item begins.
    fn open(&mut self) -> usize {
        if self.count == MAX_ITEMS {
            self.close();
        }
        if self.count == 0 {
            self.frame_start = self.bytes.len();
            self.bytes.resize(self.frame_start + HEADER_BYTES + ARRAY_HEAD_BYTES, 0);
        }
        self.bytes.len()
    }

    /// Books an item that was written at `start`; one that does not fit moves to a frame, or to frames, of its own.
    fn added(&mut self, start: usize, stream: u32) {
        self.count += 1;
        if self.bytes.len() - self.frame_start - HEADER_BYTES <= MAX_PAYLOAD {
            return;
        }
        let item = self.bytes.split_off(start);
        self.count -= 1;
        if self.count == 0 {
            self.bytes.truncate(self.frame_start);
        } else {
            self.close();
        }
        if ARRAY_HEAD_BYTES + item.len() <= MAX_PAYLOAD {
            self.open();
            self.bytes.extend_from_slice(&item);
            self.count = 1;
            return;
        }
        let pieces = item.len().div_ceil(MAX_PAYLOAD);
        for (number, piece) in item.chunks(MAX_PAYLOAD).enumerate() {
            let flags = if number + 1 == pieces { END_FLAG } else { 0 };
            self.bytes.extend_from_slice(&head(kind::ITEM_PART, flags, stream, piece.len()));
            self.bytes.extend_from_slice(piece);
        }
    }

    fn close(&mut self) {
        if self.count == 0 {
            return;
        }
        let start = self.frame_start;
        let length = self.bytes.len() - start - HEADER_BYTES;
        self.bytes[start..start + HEADER_BYTES].copy_from_slice(&head(kind::ITEMS, 0, 0, length));
        let [high, low] = (self.count as u16).to_be_bytes();
        let array = start + HEADER_BYTES;
        self.bytes[array..array + ARRAY_HEAD_BYTES].copy_from_slice(&[0xdc, high, low]);
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn plain(stream: u32, offset: u64, token_ids: &[u32]) -> Chunk<'_> {
        Chunk { stream, index: 0, offset, token_ids, finish_reason: None, extra: b"" }
    }

    /// Returns the kind of each frame, and its payload.
    fn taken(batch: &mut ItemBatch) -> Vec<(u8, u8, Vec<u8>)> {
        let mut bytes = Vec::new();
        batch.take(&mut bytes);
        let mut found = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let length = u32::from_be_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
            assert!(length <= MAX_PAYLOAD);
            found.push((rest[4], rest[5], rest[HEADER_BYTES..HEADER_BYTES + length].to_vec()));
            rest = &rest[HEADER_BYTES + length..];
        }
        found
    }

    fn read(payload: &[u8]) -> Value {
        rmp_serde::from_slice(payload).expect("msgpack")
    }

    #[test]
    fn items_of_many_streams_share_a_frame() {
        let mut batch = ItemBatch::default();
        batch.chunk(&plain(1, 0, &[5]));
        let extra = rmp_serde::to_vec_named(&json!({"text": "x"})).expect("msgpack");
        batch.chunk(&Chunk { finish_reason: Some("stop"), extra: &extra, ..plain(3, 4, &[70000, 1]) });
        batch.chunk(&Chunk { finish_reason: Some("length"), ..plain(5, 0, &[]) });
        batch.end(1, 1, b"");
        batch.object(7, 1, &[0x80]);
        let frames = taken(&mut batch);
        assert_eq!(frames.len(), 1);
        assert_eq!(
            read(&frames[0].2),
            json!([
                [1, 0, 0, [5]],
                [3, 0, 4, [70000, 1], "stop", {"text": "x"}],
                [5, 0, 0, [], "length"],
                [1, -2, 1, []],
                [7, -1, 1, [], null, {}],
            ])
        );
        assert!(taken(&mut batch).is_empty());
    }

    #[test]
    fn what_does_not_fit_goes_into_the_next_frame() {
        let mut batch = ItemBatch::default();
        let many: Vec<u32> = vec![70000; 5000];
        for stream in 0..5 {
            batch.chunk(&plain(stream, 0, &many));
        }
        let frames = taken(&mut batch);
        let counts: Vec<usize> =
            frames.iter().map(|(_, _, payload)| read(payload).as_array().map_or(0, Vec::len)).collect();
        assert_eq!(counts, [2, 2, 1]);
    }

    #[test]
    fn one_item_over_the_limit_goes_in_pieces() {
        let mut batch = ItemBatch::default();
        batch.chunk(&plain(1, 0, &[1]));
        let many: Vec<u32> = vec![70000; 30_000];
        batch.chunk(&plain(3, 0, &many));
        batch.chunk(&plain(1, 1, &[2]));
        let frames = taken(&mut batch);
        let kinds: Vec<(u8, u8)> = frames.iter().map(|(kind, flags, _)| (*kind, *flags)).collect();
        let part = kind::ITEM_PART;
        assert_eq!(kinds, [(kind::ITEMS, 0), (part, 0), (part, 0), (part, END_FLAG), (kind::ITEMS, 0)]);
        let joined: Vec<u8> = frames[1..4].iter().flat_map(|(_, _, payload)| payload.clone()).collect();
        assert_eq!(read(&joined)[3].as_array().map_or(0, Vec::len), 30_000);
    }
}
