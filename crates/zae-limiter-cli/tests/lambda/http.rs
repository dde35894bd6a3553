//! A minimal HTTP server: the test receives each request and answers it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

/// A request to be answered.
pub(crate) struct Request {
    /// Method and path.
    pub(crate) line: String,
    pub(crate) body: Vec<u8>,
    answer: Sender<String>,
}

impl Request {
    pub(crate) fn answer(self, status: &str, headers: &[(&str, &str)], body: &str) {
        let headers: String =
            headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let text = format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n{body}");
        self.answer.send(text).expect("somebody waits");
    }
}

/// A server on this machine.
pub(crate) struct Http {
    address: SocketAddr,
    requests: Receiver<Request>,
}

impl Http {
    pub(crate) fn listen() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (sender, requests) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let sender = sender.clone();
                std::thread::spawn(move || serve(stream, &sender));
            }
        });
        Self { address, requests }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// The next request, as soon as there is one.
    pub(crate) fn next(&self) -> Request {
        self.requests.recv().expect("the server goes on")
    }
}

/// Forwards the requests of one connection until the client closes it.
fn serve(stream: TcpStream, requests: &Sender<Request>) {
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut writer = stream;
    loop {
        let mut line = String::new();
        if !matches!(reader.read_line(&mut line), Ok(1..)) {
            return;
        }
        let mut length = 0;
        loop {
            let mut header = String::new();
            if !matches!(reader.read_line(&mut header), Ok(1..)) {
                return;
            }
            match header.trim().to_ascii_lowercase().split_once(':') {
                Some(("content-length", value)) => length = value.trim().parse().unwrap_or(0),
                Some(_) => {}
                None => break,
            }
        }
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let line = line.trim().trim_end_matches(" HTTP/1.1").to_owned();
        let (answer, answered) = channel();
        if requests.send(Request { line, body, answer }).is_err() {
            return;
        }
        let Ok(text) = answered.recv() else { return };
        if writer.write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}
