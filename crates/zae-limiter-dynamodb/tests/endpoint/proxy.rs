//! A proxy in front of the endpoint that can fail in the ways a network does, switched while it runs.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// In mode [`Mode::DropAnswers`] one answer of so many is dropped: 5 %.
pub(crate) const DROP_EVERY: u64 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Forwards requests and answers.
    Pass,
    /// Accepts connections and reads requests. Forwards nothing and never answers, also after the mode ends:
    /// such a connection stays silent until the client closes it.
    Hang,
    /// Forwards every request. Loses each twentieth answer: in turns, the connection is closed instead, or
    /// stays silent until the client closes it.
    DropAnswers,
    /// Closes all connections and accepts no others.
    Refuse,
}

/// Runs on a thread and a runtime of its own until it is dropped.
pub(crate) struct Proxy {
    pub(crate) url: String,
    mode: Arc<watch::Sender<Mode>>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Requests that were read, in any mode.
    requests: AtomicU64,
    /// Answers that the endpoint gave in mode [`Mode::DropAnswers`].
    answers: AtomicU64,
    /// Those of them that the client did not get.
    lost: AtomicU64,
}

impl Proxy {
    /// In front of `endpoint`, in mode [`Mode::Pass`].
    pub(crate) fn to(endpoint: &str) -> Self {
        let endpoint: SocketAddr = endpoint.trim_start_matches("http://").parse().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (mode, modes) = watch::channel(Mode::Pass);
        let counts = Arc::new(Counts::default());
        let shared = Arc::clone(&counts);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                accept(listener, address, endpoint, modes, shared).await;
            });
        });
        Self { url: format!("http://{address}"), mode: Arc::new(mode), counts }
    }

    pub(crate) fn set(&self, mode: Mode) {
        // The proxy may have ended with its last connection.
        let _ = self.mode.send(mode);
    }

    /// Requests that were read, in any mode.
    pub(crate) fn requests(&self) -> u64 {
        self.counts.requests.load(Ordering::SeqCst)
    }

    /// Answers of the endpoint that the client did not get.
    pub(crate) fn lost(&self) -> u64 {
        self.counts.lost.load(Ordering::SeqCst)
    }
}

/// Serves connections until the proxy is dropped.
async fn accept(
    listener: TcpListener,
    address: SocketAddr,
    endpoint: SocketAddr,
    mut modes: watch::Receiver<Mode>,
    counts: Arc<Counts>,
) {
    let mut listener = Some(listener);
    loop {
        let mode = *modes.borrow_and_update();
        listener = match (mode, listener) {
            (Mode::Refuse, _) => None,
            (_, Some(listener)) => Some(listener),
            // The port was this proxy's a moment ago, and nobody else asks for it by number.
            (_, None) => Some(TcpListener::bind(address).await.unwrap()),
        };
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = modes.changed() => if changed.is_err() { return },
            accepted = accepted => {
                // A client that gives up while it is accepted needs no connection.
                let Ok((near, _)) = accepted else { continue };
                let (mut modes, counts) = (modes.clone(), Arc::clone(&counts));
                tokio::spawn(async move {
                    tokio::select! {
                        // Either side has closed: nothing is left to forward.
                        _ = carry(near, endpoint, modes.clone(), &counts) => {}
                        _ = modes.wait_for(|mode| *mode == Mode::Refuse) => {}
                    }
                });
            }
        }
    }
}

/// Forwards requests of one connection, one after the other.
async fn carry(
    near: TcpStream,
    endpoint: SocketAddr,
    modes: watch::Receiver<Mode>,
    counts: &Counts,
) -> io::Result<()> {
    near.set_nodelay(true)?;
    let far = TcpStream::connect(endpoint).await?;
    far.set_nodelay(true)?;
    let (mut near, mut far) = (BufReader::new(near), BufReader::new(far));
    loop {
        let Some(request) = message(&mut near).await? else { return Ok(()) };
        counts.requests.fetch_add(1, Ordering::SeqCst);
        let mode = *modes.borrow();
        if mode == Mode::Hang {
            // Ends when the client closes the connection.
            let _ = near.read(&mut [0]).await?;
            return Ok(());
        }
        far.write_all(&request).await?;
        let Some(answer) = message(&mut far).await? else { return Ok(()) };
        if mode == Mode::DropAnswers {
            let number = counts.answers.fetch_add(1, Ordering::SeqCst) + 1;
            if number.is_multiple_of(DROP_EVERY) {
                if counts.lost.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                    let _ = near.read(&mut [0]).await?;
                }
                return Ok(());
            }
        }
        near.write_all(&answer).await?;
    }
}

/// The next message of HTTP/1.1, head and body; `None` at the end of the connection. Both the SDK and the
/// endpoint give the length of every body.
async fn message(from: &mut BufReader<TcpStream>) -> io::Result<Option<Vec<u8>>> {
    let (mut message, mut length) = (Vec::new(), 0);
    loop {
        let start = message.len();
        if from.read_until(b'\n', &mut message).await? == 0 {
            return Ok(None);
        }
        let line = String::from_utf8_lossy(&message[start..]).to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().map_err(io::Error::other)?;
        }
        if line.trim_end().is_empty() {
            break;
        }
    }
    let start = message.len();
    message.resize(start + length, 0);
    from.read_exact(&mut message[start..]).await?;
    Ok(Some(message))
}
