//! A client of core NATS, as much of it as a worker needs: events leave over it, and requests may arrive.

mod connection;
mod settings;
mod wire;

pub(crate) use connection::NatsConnection;
pub(crate) use wire::Message;

/// Returns a subject with what no subject can hold (blanks, wildcards, an empty token) as `_`.
pub(crate) fn subject(parts: &[&str]) -> String {
    let clean = |token: &str| -> String {
        let kept = |letter: char| if letter.is_whitespace() || matches!(letter, '*' | '>') { '_' } else { letter };
        if token.is_empty() { "_".to_owned() } else { token.chars().map(kept).collect() }
    };
    let tokens: Vec<String> = parts.iter().flat_map(|part| part.split('.')).map(clean).collect();
    tokens.join(".")
}

#[cfg(test)]
mod tests {
    use super::subject;

    #[test]
    fn a_subject_holds_no_blank_no_wildcard_and_no_empty_token() {
        assert_eq!(subject(&["namespace", "a.b", "component", "c d>*"]), "namespace.a.b.component.c_d__");
        assert_eq!(subject(&["", "x..y"]), "_.x._.y");
    }
}
