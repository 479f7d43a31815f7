//! The side of whoever checkpoints another process.

use std::fs::{self, File};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OPERATING_SYSTEM, CUDA_SUCCESS};

pub(crate) use super::page::Request;
use super::page::{self, BYTES, NAME, Page};
use crate::status::{Result, ensure};

/// How often a waiting call looks whether the process is still there.
const LOOK: Duration = Duration::from_millis(50);

/// Another process's page.
pub(crate) struct Remote {
    pid: i32,
    page: *mut Page,
}

impl Drop for Remote {
    fn drop(&mut self) {
        // SAFETY: the mapping of this value.
        unsafe { libc::munmap(self.page.cast(), BYTES) };
    }
}

impl Remote {
    /// The page of a process that takes part.
    pub(crate) fn open(pid: i32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let leader = status.lines().find_map(|line| line.strip_prefix("Tgid:")).and_then(|it| it.trim().parse().ok());
        if leader != Some(pid) {
            // So it may go with the real driver.
            // SAFETY: a plain system call.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        let name = format!("/memfd:{} ", NAME.to_string_lossy());
        let line = maps.lines().find(|line| line.contains(&name)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let range = line.split(' ').next().unwrap_or_default();
        let path = format!("/proc/{pid}/map_files/{range}");
        let file = File::options().read(true).write(true).open(path).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        let page = page::map(&file).ok_or(CUDA_ERROR_OPERATING_SYSTEM)?;
        Ok(Self { pid, page })
    }

    fn page(&self) -> &Page {
        // SAFETY: mapped as long as this value lives, and all of it is atomic.
        unsafe { &*self.page }
    }

    pub(crate) fn state(&self) -> u32 {
        self.page().state.load(Ordering::SeqCst)
    }

    /// The worker, as this process numbers it.
    pub(crate) fn thread(&self) -> Result<i32> {
        let number = self.page().thread.load(Ordering::SeqCst);
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid)).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let mut tids = threads.flatten().filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
        let own = |tid: i32| {
            let status = fs::read_to_string(format!("/proc/{}/task/{tid}/status", self.pid)).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
            line.split_ascii_whitespace().last()?.parse::<i32>().ok()
        };
        tids.find(|tid| own(*tid) == Some(number)).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&self, request: Request, timeout_ms: u32) -> Result<()> {
        let page = self.page();
        // A request of a process that was killed may be under way.
        self.wait_for_answer()?;
        page.request.store(request as u32, Ordering::SeqCst);
        page.timeout_ms.store(timeout_ms, Ordering::SeqCst);
        page::set(&page.asked, page.asked.load(Ordering::SeqCst).wrapping_add(1));
        self.wait_for_answer()?;
        match page.result.load(Ordering::SeqCst) {
            CUDA_SUCCESS => Ok(()),
            error => Err(error),
        }
    }

    fn wait_for_answer(&self) -> Result<()> {
        let page = self.page();
        loop {
            let answered = page.answered.load(Ordering::SeqCst);
            if answered == page.asked.load(Ordering::SeqCst) {
                return Ok(());
            }
            page::wait(&page.answered, answered, LOOK);
            ensure(fs::metadata(format!("/proc/{}/maps", self.pid)).is_ok() && self.lives(), CUDA_ERROR_INVALID_VALUE)?;
        }
    }

    fn lives(&self) -> bool {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        !matches!(text.rsplit(')').next().and_then(|it| it.trim().chars().next()), None | Some('Z' | 'X'))
    }
}
