//! Ctrl-C and SIGTERM.

use tokio::sync::watch;

use crate::exit::ExitStatus;

/// A request to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
}

impl Interrupt {
    /// How a program ends that was stopped by it: 128 and the number of the signal.
    pub fn status(self) -> ExitStatus {
        ExitStatus::Other(match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        })
    }
}

/// Requests to stop, as they come. Each clone sees all that come after it was made.
#[derive(Clone, Debug)]
pub struct Interrupts {
    /// The latest one, and how many there were; none ever comes once the sender is gone.
    latest: watch::Receiver<(u64, Interrupt)>,
}

impl Interrupts {
    /// None ever comes.
    pub fn none() -> Self {
        Self::by_hand().1
    }

    /// They come when the first half sends one.
    pub fn by_hand() -> (Interrupter, Self) {
        let (sender, latest) = watch::channel((0, Interrupt::Interrupt));
        (Interrupter(sender), Self { latest })
    }

    /// The process's signals. From here on they no longer end the process by themselves; where they
    /// cannot be listened to they do.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn of_this_process() -> Self {
        let (sender, interrupts) = Self::by_hand();
        forward_signals(sender);
        interrupts
    }

    /// The next one that comes.
    pub async fn next(&mut self) -> Interrupt {
        if self.latest.changed().await.is_err() {
            return std::future::pending().await;
        }
        self.latest.borrow_and_update().1
    }
}

/// Sends interrupts.
#[derive(Debug)]
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
    // Registered here and not in the task, which may be polled late.
    let ctrl_c = signal(SignalKind::interrupt());
    let terminate = signal(SignalKind::terminate());
    let (Ok(mut ctrl_c), Ok(mut terminate)) = (ctrl_c, terminate) else { return };
    tokio::spawn(async move {
        loop {
            tokio::select! {
                Some(()) = ctrl_c.recv() => to.send(Interrupt::Interrupt),
                Some(()) = terminate.recv() => to.send(Interrupt::Terminate),
                else => return,
            }
        }
    });
}

#[cfg(not(unix))]
fn forward_signals(to: Interrupter) {
    tokio::spawn(async move {
        while tokio::signal::ctrl_c().await.is_ok() {
            to.send(Interrupt::Interrupt);
        }
    });
}
