//! Any value of MessagePack, also those that JSON does not have.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Raw {
    Nil,
    Bool(bool),
    /// A whole number; those of 64 bits without a sign are above `i64`.
    Whole(i128),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Raw>),
    Map(Vec<(Raw, Raw)>),
}

impl Raw {
    pub(crate) fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub(crate) fn list(&self) -> Option<&[Raw]> {
        if let Self::List(items) = self { Some(items) } else { None }
    }

    pub(crate) fn whole(&self) -> Option<i128> {
        if let Self::Whole(number) = self { Some(*number) } else { None }
    }

    /// Returns the member of a map with this name.
    pub(crate) fn get(&self, name: &str) -> Option<&Raw> {
        let Self::Map(members) = self else { return None };
        members.iter().find(|(key, _)| key.text() == Some(name)).map(|(_, value)| value)
    }

    /// Returns what kind of value it is, for an error.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "a switch",
            Self::Whole(_) => "a whole number",
            Self::Float(_) => "a fraction",
            Self::Text(_) => "a text",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
        }
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Raw;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a value of MessagePack")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Raw, E> {
                Ok(Raw::Nil)
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Raw, E> {
                Ok(Raw::Bool(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Raw, E> {
                Ok(Raw::Whole(value.into()))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Raw, E> {
                Ok(Raw::Whole(value.into()))
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Raw, E> {
                Ok(Raw::Float(value))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Raw, E> {
                Ok(Raw::Text(value.to_owned()))
            }

            fn visit_bytes<E: de::Error>(self, value: &[u8]) -> Result<Raw, E> {
                Ok(Raw::Bytes(value.to_vec()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Raw, A::Error> {
                // What the sender announces is not believed beyond a page.
                let mut found = Vec::with_capacity(items.size_hint().unwrap_or(0).min(1024));
                while let Some(item) = items.next_element()? {
                    found.push(item);
                }
                Ok(Raw::List(found))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Raw, A::Error> {
                let mut found = Vec::new();
                while let Some(member) = members.next_entry()? {
                    found.push(member);
                }
                Ok(Raw::Map(found))
            }
        }
        deserializer.deserialize_any(Any)
    }
}
