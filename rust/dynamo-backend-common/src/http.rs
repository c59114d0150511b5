//! One request of HTTP/1.1 at a time, on a connection of its own. Calls block.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

const MAX_ANSWER_BYTES: usize = 4 * 1024 * 1024;

/// What a server answered.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// Sends a body to `endpoint` (HOST:PORT) and returns the answer; `headers` are lines that end with CR LF.
///
/// Fails with `TimedOut` once `patience` is over, and with `InvalidData` for an answer that is not HTTP.
pub(crate) fn post(endpoint: &str, path: &str, headers: &str, body: &[u8], patience: Duration) -> io::Result<Answer> {
    let ends_at = Instant::now() + patience;
    let left = || {
        let left = ends_at.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(late()) } else { Ok(left) }
    };
    let mut socket = None;
    let mut why = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in endpoint.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left()?) {
            Ok(connected) => {
                socket = Some(connected);
                break;
            }
            Err(error) => why = error,
        }
    }
    let Some(mut socket) = socket else { return Err(why) };
    socket.set_write_timeout(Some(left()?))?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {endpoint}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes())?;
    socket.write_all(body)?;
    let mut answer = Vec::new();
    let mut piece = [0; 8192];
    loop {
        socket.set_read_timeout(Some(left()?))?;
        match socket.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(late());
            }
            Err(error) => return Err(error),
        }
        if answer.len() > MAX_ANSWER_BYTES {
            return Err(strange(format!("an answer of more than {MAX_ANSWER_BYTES} bytes")));
        }
    }
    read_answer(&answer).ok_or_else(|| strange("not an answer of HTTP".into()))
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}

fn strange(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn read_answer(answer: &[u8]) -> Option<Answer> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
    let status: u16 = head.split(' ').nth(1)?.parse().ok()?;
    let is_chunked = head.lines().any(|line| line.starts_with("transfer-encoding:") && line.contains("chunked"));
    let body = &answer[end + 4..];
    let body = if is_chunked { unchunked(body)? } else { body.to_vec() };
    Some(Answer { status, body })
}

fn unchunked(body: &[u8]) -> Option<Vec<u8>> {
    let (mut rest, mut whole) = (body, Vec::new());
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        let size = std::str::from_utf8(&rest[..end]).ok()?.split(';').next()?.trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        rest = &rest[end + 2..];
        if size == 0 {
            return Some(whole);
        }
        whole.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size.checked_add(2)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_whole_or_in_chunks() {
        let read = |answer: &[u8]| read_answer(answer).map(|answer| (answer.status, answer.body));
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab";
        assert_eq!(read(whole), Some((200, b"ab".to_vec())));
        let chunked = b"HTTP/1.1 503 Late\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n";
        assert_eq!(read(chunked), Some((503, b"abcde".to_vec())));
        for strange in [&b""[..], b"HTTP/1.1\r\n\r\n{}", &chunked[..60]] {
            assert_eq!(read(strange), None);
        }
    }
}
