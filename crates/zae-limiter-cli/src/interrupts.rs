//! Ctrl-C, SIGTERM and SIGHUP.

use tokio::sync::watch;

use crate::exit::ExitStatus;

/// A request to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGHUP: the terminal was closed.
    Hangup,
}

impl Interrupt {
    /// The exit status after this signal: 128 plus its number.
    pub fn status(self) -> ExitStatus {
        ExitStatus::Other(match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
            Self::Hangup => 129,
        })
    }
}

/// A stream of requests to stop. Each clone receives what the original has not yet yielded.
#[derive(Clone, Debug)]
pub struct Interrupts {
    /// The number of interrupts so far, and the latest. Stays silent once the sender is dropped.
    latest: watch::Receiver<(u64, Interrupt)>,
}

impl Interrupts {
    /// A stream that never yields.
    pub fn none() -> Self {
        Self::by_hand().1
    }

    /// A sender and the stream that yields what it sends.
    pub fn by_hand() -> (Interrupter, Self) {
        let (sender, latest) = watch::channel((0, Interrupt::Interrupt));
        (Interrupter(sender), Self { latest })
    }

    /// The signals of this process. They no longer end the process by themselves, unless the
    /// handlers cannot be installed.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn of_this_process() -> Self {
        let (sender, interrupts) = Self::by_hand();
        forward_signals(sender);
        interrupts
    }

    /// A stream that yields only what is sent from now on.
    pub(crate) fn later(&self) -> Self {
        let mut later = self.clone();
        later.latest.borrow_and_update();
        later
    }

    /// Waits for the next interrupt.
    pub async fn next(&mut self) -> Interrupt {
        if self.latest.changed().await.is_err() {
            return std::future::pending().await;
        }
        self.latest.borrow_and_update().1
    }
}

/// Sends interrupts to [`Interrupts`].
#[derive(Clone, Debug)]
pub struct Interrupter(watch::Sender<(u64, Interrupt)>);

impl Interrupter {
    /// Sends one.
    pub fn send(&self, interrupt: Interrupt) {
        self.0.send_modify(|(count, latest)| {
            *count += 1;
            *latest = interrupt;
        });
    }
}

#[cfg(unix)]
fn forward_signals(to: Interrupter) {
    use tokio::signal::unix::{SignalKind, signal};
    // Registered here, because the task may be polled late.
    let ctrl_c = signal(SignalKind::interrupt());
    let terminate = signal(SignalKind::terminate());
    let (Ok(mut ctrl_c), Ok(mut terminate)) = (ctrl_c, terminate) else { return };
    let mut hangup = can_handle_hangup().then(|| signal(SignalKind::hangup()).ok()).flatten();
    tokio::spawn(async move {
        loop {
            let hung_up = async {
                match &mut hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(()) = hung_up => to.send(Interrupt::Hangup),
                Some(()) = ctrl_c.recv() => to.send(Interrupt::Interrupt),
                Some(()) = terminate.recv() => to.send(Interrupt::Terminate),
                else => return,
            }
        }
    });
}

/// Whether SIGHUP is not ignored. `nohup` ignores it, and a handler would undo that. Only Linux tells; elsewhere SIGHUP
/// keeps its effect.
#[cfg(unix)]
fn can_handle_hangup() -> bool {
    const SIGHUP_BIT: u64 = 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & SIGHUP_BIT == 0)
}

#[cfg(not(unix))]
fn forward_signals(to: Interrupter) {
    tokio::spawn(async move {
        while tokio::signal::ctrl_c().await.is_ok() {
            to.send(Interrupt::Interrupt);
        }
    });
}
