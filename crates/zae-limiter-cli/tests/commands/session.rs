use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use zae_limiter::store::BoxFuture;
use zae_limiter::testing::{Clock, Entropy, ManualClock};
use zae_limiter::{RateLimiter, Timestamp};
use zae_limiter_cli::{Interrupt, Interrupter, Interrupts, Terminal, TerminalSize, World};

/// 2026-11-15T14:25:36Z
const START_MS: i64 = 1_794_752_736_000;

thread_local! {
    /// The seed of this thread's current run: another one for each command line, but the same in
    /// every test run.
    static SEED: Cell<u64> = const { Cell::new(0) };
}

/// Runs command lines on one store and records a transcript.
pub struct Session {
    folder: TempDir,
    clock: Arc<ManualClock>,
    pub env: BTreeMap<String, String>,
    pub stdin: &'static str,
    /// The program's own executable.
    pub program: Option<PathBuf>,
    pub terminal: Terminal,
    pub transcript: String,
    /// Whether every deadline of the limiter passes as soon as a call has to wait.
    pub impatient: bool,
    /// Sends Ctrl-C when a command waits for an answer, which never comes.
    pub interrupt_at_prompt: bool,
    /// Sends Ctrl-C when a command has waited this long.
    pub interrupt_after: Option<Duration>,
    /// Sets the time of day back by this much during each wait of a command.
    pub set_back: Duration,
    runs: u64,
}

impl Session {
    pub fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            clock: Arc::new(ManualClock::new(Timestamp::from_millis(START_MS))),
            env: BTreeMap::from([("USER".to_owned(), "ada".to_owned())]),
            stdin: "",
            program: None,
            terminal: Terminal::default(),
            transcript: String::new(),
            impatient: false,
            interrupt_at_prompt: false,
            interrupt_after: None,
            set_back: Duration::ZERO,
            runs: 0,
        }
    }

    /// On a terminal of 80 columns, with `answer` on stdin.
    pub fn on_a_terminal(mut self, answer: &'static str) -> Self {
        self.terminal =
            Terminal { stdin: true, stdout: true, stderr: true, size: TerminalSize::fixed(80, 24) };
        self.stdin = answer;
        self
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn advance(&mut self, by: Duration) {
        self.clock.advance(by);
        writeln!(self.transcript, "({} s later)\n", by.as_secs_f64()).unwrap();
    }

    /// Runs a command line and returns its exit status. Spaces separate words; `'…'` quotes them.
    pub fn run(&mut self, line: &str) -> u8 {
        writeln!(self.transcript, "$ zae-limiter {line}").unwrap();
        let (status, stdout, stderr) = self.run_unseen(line, usize::MAX);
        self.note("", &stdout);
        self.note("! ", &stderr);
        writeln!(self.transcript, "exit {status}\n").unwrap();
        status
    }

    /// As [`run`](Self::run), but not in the transcript. Returns the exit status, stdout and stderr.
    /// Stdout is a pipe that closes after `read_max` bytes.
    pub fn run_unseen(&mut self, line: &str, read_max: usize) -> (u8, String, String) {
        let (stdout, stderr) = (Buffer::up_to(read_max), Buffer::up_to(usize::MAX));
        self.runs += 1;
        SEED.set(self.runs);
        let (interrupter, interrupts) = Interrupts::by_hand();
        let interrupt_at = self.interrupt_after.map(|wait| self.clock.now().saturating_add(wait));
        let clock = Arc::clone(&self.clock);
        let stdin: Box<dyn BufRead + Send> = match self.interrupt_at_prompt {
            true => Box::new(InterruptedPrompt(interrupter.clone())),
            false => Box::new(self.stdin.as_bytes()),
        };
        let pace =
            Arc::new(JumpingClock { clock, interrupt_at, interrupter, set_back: self.set_back });
        let limiters: Arc<dyn Clock> = match self.impatient {
            true => Arc::new(ImpatientClock(Arc::clone(&self.clock))),
            false => Arc::clone(&self.clock) as _,
        };
        let world = World {
            args: words(line).into_iter().map(Into::into).collect(),
            env: self.env.clone(),
            data_dir: Some(self.folder.path().join("data")),
            program: self.program.clone(),
            clock: limiters,
            pace,
            entropy: || Entropy::seeded(SEED.get()),
            stdin,
            stdout: Box::new(stdout.clone()),
            stderr: Box::new(stderr.clone()),
            terminal: self.terminal.clone(),
            interrupts,
            exit: |status| panic!("exit with {status}"),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let status = runtime.block_on(zae_limiter_cli::run(world)).code();
        (status, stdout.text(), stderr.text())
    }

    /// A limiter on the session's store, to fill it quickly.
    pub async fn limiter(&self) -> RateLimiter {
        std::fs::create_dir_all(self.folder().join("data")).unwrap();
        let url = format!("sqlite:{}", self.folder().join("data/limits.db").display());
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let entropy = Entropy::seeded(u64::MAX);
        zae_limiter::builder(&url).unwrap().clock(clock).entropy(entropy).open().await.unwrap()
    }

    /// Adds the content of a stream to the transcript, with a mark before each line.
    fn note(&mut self, mark: &str, text: &str) {
        // The temporary folder's name differs from run to run.
        let text = text.replace(&*self.folder.path().to_string_lossy(), "FOLDER");
        let text = text.replace('\x1b', "␛").replace('\r', "␍");
        for line in text.lines() {
            writeln!(self.transcript, "{}", format!("{mark}{line}").trim_end()).unwrap();
        }
    }
}

/// A terminal whose user presses Ctrl-C instead of answering.
struct InterruptedPrompt(Interrupter);

impl Read for InterruptedPrompt {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        self.fill_buf().map(<[u8]>::len)
    }
}

impl BufRead for InterruptedPrompt {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.0.send(Interrupt::Interrupt);
        loop {
            std::thread::park();
        }
    }

    fn consume(&mut self, _: usize) {}
}

fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (at, piece) in line.split('\'').enumerate() {
        if at % 2 == 1 {
            words.push(piece.to_owned());
        } else {
            words.extend(piece.split_whitespace().map(str::to_owned));
        }
    }
    words
}

#[derive(Clone)]
struct Buffer {
    bytes: Arc<Mutex<Vec<u8>>>,
    length_max: usize,
}

impl Buffer {
    fn up_to(length_max: usize) -> Self {
        Self { bytes: Arc::default(), length_max }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut written = self.bytes.lock().unwrap();
        match bytes.len().min(self.length_max - written.len()) {
            0 if !bytes.is_empty() => Err(io::ErrorKind::BrokenPipe.into()),
            length => written.write(&bytes[..length]),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A clock whose sleeps end at once and advance the time.
#[derive(Debug)]
struct JumpingClock {
    clock: Arc<ManualClock>,
    interrupt_at: Option<Timestamp>,
    interrupter: Interrupter,
    set_back: Duration,
}

impl Clock for JumpingClock {
    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn stopwatch(&self) -> Duration {
        self.clock.stopwatch()
    }

    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.clock.advance(wait);
        let back = i64::try_from(self.set_back.as_millis()).unwrap();
        self.clock.correct(Timestamp::from_millis(self.clock.now().as_millis() - back));
        if self.interrupt_at.is_some_and(|moment| moment <= self.clock.now()) {
            self.interrupter.send(Interrupt::Interrupt);
        }
        Box::pin(std::future::ready(()))
    }
}

/// A clock whose sleeps end when everything else has been tried once.
#[derive(Debug)]
struct ImpatientClock(Arc<ManualClock>);

impl Clock for ImpatientClock {
    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn sleep(&self, _: Duration) -> BoxFuture<'_, ()> {
        Box::pin(tokio::task::yield_now())
    }
}
