//! A fake endpoint: a function decides the reply to each request, so that a test can lose an answer.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A request as the endpoint received it.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The operation, as in `UpdateItem`.
    pub(crate) operation: String,
    pub(crate) body: String,
}

impl Request {
    /// The token under which a transaction is sent.
    pub(crate) fn token(&self) -> String {
        let body: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        body["ClientRequestToken"].as_str().expect("a transaction has a token").to_owned()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Reply {
    /// A status line and a body.
    Http(&'static str, &'static str),
    /// A success status and only the first half of the body that it announces.
    HalfAnswer(&'static str),
    /// The connection closes without an answer.
    Close,
    /// The connection stays open without an answer.
    Silence,
}

/// An error as DynamoDB sends it: status 400, and a body with `code`.
pub(crate) const fn refuse(body: &'static str) -> Reply {
    Reply::Http("400 Bad Request", body)
}

pub(crate) struct Fake {
    pub(crate) url: String,
    received: Arc<Mutex<Vec<Request>>>,
}

impl Fake {
    /// `reply` gets the number of requests before this one, and the request.
    pub(crate) fn new(reply: impl Fn(usize, &Request) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&received);
        std::thread::spawn(move || {
            let mut silent = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                // A connection that the client gave up before it sent anything is no request.
                let Some(request) = read(&stream) else { continue };
                let before = {
                    let mut list = list.lock().unwrap();
                    list.push(request.clone());
                    list.len() - 1
                };
                match reply(before, &request) {
                    Reply::Http(status, body) => answer(&mut stream, status, body, body.len()),
                    Reply::HalfAnswer(body) => {
                        let half = &body[..body.len() / 2];
                        answer(&mut stream, "200 OK", half, body.len());
                    }
                    Reply::Close => {}
                    Reply::Silence => silent.push(stream),
                }
            }
        });
        Self { url, received }
    }

    /// The same reply to every request.
    pub(crate) fn always(reply: Reply) -> Self {
        Self::new(move |_, _| reply)
    }

    /// The replies in this order; the last one to all further requests.
    pub(crate) fn in_turn(replies: &'static [Reply]) -> Self {
        Self::new(|before, _| replies[before.min(replies.len() - 1)])
    }

    /// All requests so far.
    pub(crate) fn received(&self) -> Vec<Request> {
        self.received.lock().unwrap().clone()
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let (mut line, mut length, mut operation) = (String::new(), 0, String::new());
    while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
        let (name, value) = line.split_once(':').unwrap_or_default();
        match &*name.to_ascii_lowercase() {
            "content-length" => length = value.trim().parse().unwrap(),
            "x-amz-target" => {
                operation = value.trim().rsplit('.').next().unwrap_or_default().to_owned();
            }
            _ => {}
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let body = String::from_utf8(body).unwrap();
    (!operation.is_empty()).then_some(Request { operation, body })
}

fn answer(stream: &mut TcpStream, status: &str, body: &str, length: usize) {
    // The client may have closed the connection.
    let _ = write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-type: application/x-amz-json-1.0\r\n\
         content-length: {length}\r\nconnection: close\r\n\r\n{body}",
    );
}
